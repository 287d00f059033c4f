"""examples/sparse/rigl_mnist.py learns, resumes, and runs on replicas with a trace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.xla_replica.replicas import of_torch_alone
from support.xla_replica.torchrun import LAUNCHER

import variable_batch_size as vbs

ROOT = Path(__file__).resolve().parents[2]


def run(
    *arguments: str, launcher: tuple[str, ...] = (sys.executable,), fails: bool = False
) -> str:
    """Runs the script; returns what it prints, or tells of where it ``fails``."""
    pytest.importorskip("sklearn")
    command = [*launcher, str(ROOT / "examples" / "sparse" / "rigl_mnist.py")]
    command += ["--dataset", "digits", "--device", "cpu", "--delta", "10", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy ([\d.]+) %", output)]


def results(output: str) -> str:
    """Returns the output without what gloo's threads write before, as they connect."""
    return output[output.index("epoch 0:") :]


@of_torch_alone
def test_it_learns_and_resumes(tmp_path):
    checkpoint = ["--checkpoint", str(tmp_path / "digits")]
    whole = run("--epochs", "12", *checkpoint)
    assert accuracies(whole)[-1] > 80
    assert "num_rigl_steps=13" in whole  # T_end is 135
    assert "complete" not in whole
    again = run("--epochs", "12", *checkpoint)
    assert f"complete: 12 epochs, test accuracy {accuracies(whole)[-1]:.2f} %" in again
    assert "the topology stays" not in again
    more = run("--epochs", "14", *checkpoint)
    assert "the topology stays from update 135 on, as this run began" in more
    assert "would stop at 157" in more
    assert len(accuracies(more)) == 2
    assert "step=210" in more
    updates = vbs.read_run(tmp_path / "digits" / "run.jsonl").updates
    assert updates["step"].tolist() == list(range(210))
    told = updates["accuracy"].dropna().tolist()
    assert told == pytest.approx(accuracies(whole) + accuracies(more), abs=0.01)
    assert updates["loss"].dropna().iloc[-1] < updates["loss"].dropna().iloc[0] / 2
    refused = run("--sparsity", "0.5", "--lr", "9", *checkpoint, fails=True)
    assert re.search(r"of another run: .*lr was 0.1 and is 9.*sparsity was 0", refused)


@of_torch_alone
def test_on_replicas_with_a_trace():
    trace = ["--trace", "96,32,64", "--epochs", "3"]
    alone, together = run(*trace), run(*trace, "--num-replicas", "2")
    masks = re.compile(r"nonzero_params=.*")
    assert masks.search(alone).group() == masks.search(together).group()
    assert accuracies(together) == pytest.approx(accuracies(alone), abs=2)


@pytest.mark.slow
def test_under_torchrun():
    """The run is that of two replicas that the script starts, a line for each epoch."""
    trace = ["--trace", "96,32,64", "--epochs", "3"]
    own, torchrun = run(*trace, "--num-replicas", "2"), run(*trace, launcher=LAUNCHER)
    assert len(accuracies(torchrun)) == 3
    assert results(torchrun) == results(own)
