"""What the README shows works: its diff is applied, and both sides are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import ROOT, blocks, patched, read, sides
from support.torchrun import LAUNCHER

README = read("README.md")

# What the README's script imports from its own project.
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


def scripts() -> tuple[str, str, str]:
    """Returns the user's script, the elastic one, and that with AdaScale."""
    to_elastic, to_adascale = blocks("README.md", "diff")
    ordinary, elastic = sides(to_elastic)
    return ordinary, elastic, patched(elastic, to_adascale)


def run(script: str, folder: Path, *launcher: str) -> list[float]:
    """Returns the accuracies that the script's replicas print."""
    (folder / "my_project.py").write_text(MY_PROJECT)
    (folder / "trace.csv").write_text(
        "step,batchsize\n" + "".join(f"{n},{32 + 32 * (n % 6)}\n" for n in range(40))
    )
    script = script.replace("import Net, dataset", "import Net, accuracy, dataset")
    script = script.replace("    return model\n", REPORT)
    (folder / "train.py").write_text(script)
    kept = {k: v for k, v in os.environ.items() if k != "PJRT_DEVICE"}
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.stdout)]


def test_the_script_before_the_diff_trains(tmp_path):
    assert run(scripts()[0], tmp_path)[0] > 0.9


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_the_script_after_the_diff_trains_on_every_replica_alike(
    tmp_path, num_replicas
):
    script = scripts()[1]
    launch = "xla_replica.launch(train)"
    assert launch in script
    script = script.replace(launch, launch[:-1] + f", num_replicas={num_replicas})")
    accuracies = run(script, tmp_path)
    assert len(accuracies) == num_replicas
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 0.9


def test_the_script_after_the_diff_trains_under_torchrun(tmp_path):
    accuracies = run(scripts()[1], tmp_path, *LAUNCHER[1:])
    assert len(accuracies) == 2
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 0.9


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_the_script_with_adascale_trains_on_every_replica_alike(tmp_path, num_replicas):
    launch = "xla_replica.launch(train)"
    script = scripts()[2].replace(
        launch, launch[:-1] + f", num_replicas={num_replicas})"
    )
    accuracies = run(script, tmp_path)
    assert len(accuracies) == num_replicas
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 0.9


def test_the_diff_is_as_short_as_it_says():
    added = [
        line for line in blocks("README.md", "diff")[0].splitlines() if line[0:1] == "+"
    ]
    assert len(added) <= 17


def test_the_readme_names_make_targets_and_python_versions_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert ">=3.10" in (ROOT / "setup.py").read_text()
