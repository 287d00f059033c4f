"""What the README shows works, and so do the diffs of the pages."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.documents import block, blocks, patched, read, sides
from support.scripts import python
from support.xla_replica.replicas import HAS_XLA, MARKS, of_torch_alone
from support.xla_replica.torchrun import LAUNCHER

from tools.size.count_lines import PACKAGES

README = read("README.md")
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


@of_torch_alone
def test_the_quick_start_runs_as_it_is_printed(tmp_path, monkeypatch):
    """In an empty folder, with the packages installed."""
    monkeypatch.chdir(tmp_path)
    [script] = blocks("README.md", "python")
    Path("train.py").write_text(script)
    assert "xla_replica.launch(train)\n" in script  # on a TPU, too, trains on the TPU
    section = README[README.index("## Quick start") : README.index("## What nobody")]
    commands = block("README.md", "sh", "vbs make ramp").strip().splitlines()
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", binaries)
    for command in commands:
        done = python(*shlex.split(command), command=(), timeout=600)
    [said] = re.findall(r"to a test accuracy of (\d+) %", " ".join(section.split()))
    assert re.search(r"samples, update=149/149, epoch=9, batch=160, lr=", done.stderr)
    [reached] = re.findall(r"^test accuracy ([\d.]+) %$", done.stdout, re.MULTILINE)
    assert float(reached) > float(said) - 1.5
    assert Path("run").is_dir()


def scripts() -> dict[str, str]:
    """Returns the scripts before and after a diff, and the first with AdaScale."""
    [ordinary] = blocks("docs/migration/README.md", "diff")
    [of_ddp] = blocks("docs/migration/distributed_data_parallel.md", "diff")
    [of_xla] = blocks("docs/migration/torch_xla.md", "diff")
    [to_adascale] = blocks("docs/rules.md", "diff")
    diffs = {"ordinary": ordinary, "DDP": of_ddp, "torch_xla": of_xla}
    found = {
        f"{side} {name}": script
        for name, diff in diffs.items()
        for side, script in zip(("before", "after"), sides(diff), strict=True)
    }
    return {**found, "AdaScale": patched(found["after ordinary"], to_adascale)}


@pytest.mark.parametrize(("name", "num_replicas", "launcher"), [
    pytest.param("before ordinary", 1, (), marks=of_torch_alone),
    pytest.param("after ordinary", 3, (), marks=of_torch_alone),
    pytest.param("after ordinary", 2, LAUNCHER, marks=of_torch_alone),
    pytest.param("AdaScale", 3, (), marks=of_torch_alone),
    pytest.param("before DDP", 2, LAUNCHER, marks=pytest.mark.slow),
    pytest.param("after DDP", 2, LAUNCHER, marks=pytest.mark.slow),
    pytest.param("before torch_xla", 1, (),
                 marks=[*MARKS["xla"], pytest.mark.slow]),
    ("after torch_xla", 2 if HAS_XLA else 1, ()),
])  # fmt: skip
def test_a_script_trains_on_every_replica_alike(
    tmp_path, monkeypatch, name, num_replicas, launcher
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    Path("my_project.py").write_text(MY_PROJECT)
    rows = "".join(f"{n},{32 + 32 * (n % 6)}\n" for n in range(40))
    Path("trace.csv").write_text(f"step,batchsize\n{rows}")
    script = scripts()[name].replace(
        "import Net, dataset", "import Net, accuracy, dataset"
    )
    script = script.replace("    return model\n", REPORT)
    if not launcher:
        script = script.replace(
            "xla_replica.launch(train)",
            f"xla_replica.launch(train, (), {num_replicas})",
        )
    Path("train.py").write_text(script)
    done = python(*launcher[1:], "train.py", timeout=300, OMP_NUM_THREADS="1")
    first, *others = map(float, re.findall(r"accuracy ([\d.]+)", done.stdout))
    assert others == [first] * (num_replicas - 1)
    assert first > 0.9


def test_the_diff_of_an_ordinary_script_is_short():
    [diff] = blocks("docs/migration/README.md", "diff")
    assert len(re.findall(r"^\+", diff, re.MULTILINE)) <= 15


@pytest.mark.parametrize(("page", "most"), [
    ("README.md", 900), *((f"docs/{name}.md", 2000) for name in PACKAGES),
])  # fmt: skip
def test_a_first_page_is_short(page, most):
    shown = re.sub("<!--.*?-->", "", read(page))
    assert len(shown.split()) <= most
    assert page != "README.md" or shown.count("\n") <= 120


def test_the_readme_names_make_targets_and_python_versions_that_exist():
    makefile = read("Makefile")
    for target in re.findall(r"(?<!vbs )make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert ">=3.10" in read("setup.py")
