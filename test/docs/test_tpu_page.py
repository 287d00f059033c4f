"""The lines for the first day on a TPU, on emulated replicas in place of its chips."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support.documents import ROOT, block, read
from support.scripts import python
from support.xla_replica.replicas import needs_xla

LINES = block("docs/tpu.md", "sh", "PJRT_DEVICE=TPU").splitlines()
# What only a TPU VM can run.
EXCEPTED = ("gcloud", "python3 -m venv", "pip install", "export")
# Of each other line: what is added to it, that it takes seconds.
SMALLER = {
    "python -c": "",
    "cases.py": "'plain step' 'GraB, mean, exact'",
    "variable_train_mnist.py": "--num-replicas 2 --dataset fake",
    "bench_step.py": "--rounds 1 --steps 1",
    "bench_grab.py": "--types mean --sizes 1000 --batches 4 --epochs 1",
    "compilations.txt": "--num-replicas 2 --dataset fake --epochs 1",
}
RUN = dict(zip(SMALLER, [x for x in LINES if not x.startswith(EXCEPTED)], strict=True))
PAGE = read("docs/tpu.md")


def test_every_line_is_run_or_excepted():
    assert len(LINES) == 10
    assert all(name in line for name, line in RUN.items())


@needs_xla
@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_a_line_prints_what_the_page_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [prints] = re.findall(rf"^\| `{re.escape(name)}` \|.*\| (.*) \|$", PAGE, re.M)
    command, *redirected = RUN[name].replace("replicas 8", "replicas 2").split(" 2> ")
    command = " 2> ".join([f"{command} {SMALLER[name]}", *redirected])
    for folder in ("tools", "test"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "2",
    }
    done = python(command, command=["sh", "-c"], timeout=500, **variables)
    text = done.stdout + done.stderr
    for file in tmp_path.glob("*.txt"):
        text += file.read_text()
    assert done.returncode == 0, text
    if name == "python -c":
        assert done.stdout == "2\n"
    for said in re.findall("`([^`]+)`", prints):
        assert said.replace("8", "2") in text, text
