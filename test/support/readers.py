"""Running the scripts that the pages show, in the project of an imagined reader."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.documents import ROOT

# What the pages' scripts import from the reader's project.
MY_PROJECT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
labels = torch.arange(512) % 4
images = torch.randn(512, 8, generator=generator) / 2 + torch.eye(8)[labels] * 3
dataset = TensorDataset(images, labels)

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

def accuracy(model):
    model.eval()
    with torch.no_grad():
        guesses = model(images.to(next(model.parameters()).device)).argmax(1).cpu()
    return (guesses == labels).double().mean().item()
"""
# One write, so that two processes cannot mix theirs.
REPORT = "    print(f'accuracy {accuracy(model)}', flush=True)\n    return model\n"
LAUNCH = "xla_replica.launch(train)"


def on_replicas(num_replicas: int, script: str) -> str:
    """Returns the script with a number of replicas in its call of `launch`."""
    assert LAUNCH in script
    return script.replace(LAUNCH, f"{LAUNCH[:-1]}, num_replicas={num_replicas})")


def run_script_of_reader(script: str, folder: Path, *launcher: str) -> list[float]:
    """Returns the accuracies that the script's replicas print."""
    (folder / "my_project.py").write_text(MY_PROJECT)
    rows = "".join(f"{n},{32 + 32 * (n % 6)}\n" for n in range(40))
    (folder / "trace.csv").write_text(f"step,batchsize\n{rows}")
    script = script.replace("import Net, dataset", "import Net, accuracy, dataset")
    script = script.replace("    return model\n", REPORT)
    (folder / "train.py").write_text(script)
    kept = {k: v for k, v in os.environ.items() if k != "PJRT_DEVICE"}
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"], cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.stdout)]


def check_trained(accuracies: list[float], num_replicas: int) -> None:
    """Asserts that so many replicas have learnt, and the same."""
    assert len(accuracies) == num_replicas
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 0.9
