"""The MNIST script when it is killed, asked to stop, or resized under torchrun."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.documents import ROOT
from support.scripts import descendants, environment, words
from support.xla_replica.replicas import of_torch_alone
from support.xla_replica.torchrun import free_port, wait_for_server

from variable_batch_size.checkpoint import files

SCRIPT = ROOT / "test/variable_train_mnist.py"
# Steps of up to 64 minibatches.
ARGUMENTS = (
    "--no-progress", "--dataset", "fake", "--epochs", "24", "--batch-size", "16",
    "--log-steps", "1", "--ref-batchsize", "64",
)  # fmt: skip
PATIENCE = 240.0


class Run(contextlib.AbstractContextManager):
    """Runs the script in other processes, all of which end with the ``with`` block."""

    def __init__(
        self, folder: Path, *arguments, replicas=1, command=(sys.executable,), **more
    ) -> None:
        self.folder = folder
        self._output = folder.parent / f"output-{time.monotonic_ns()}"
        device = ("--device", "cpu", "--num-replicas", replicas) if replicas else ()
        command = (*command, SCRIPT, *ARGUMENTS, "--checkpoint", folder, *device)
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                words([*command, *arguments]),
                env={**environment(), "PYTHONPATH": str(ROOT), **more},
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __exit__(self, *error) -> None:
        self.kill()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def pids(self) -> list[int]:
        """The processes that it has started, the script the last."""
        return [*descendants(self.process.pid), self.process.pid]

    def kill(self) -> None:
        for pid in reversed(self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ends(self, status: int = 0) -> None:
        assert self.process.wait(PATIENCE) == status, self.output

    def wait_for_update(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while num_updates(self.folder) < number:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)


def num_updates(folder: Path) -> int:
    saved = files.saved_files(folder)
    return saved[0].num_updates if saved else 0


def history(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "history.csv")


def assert_same_training(received: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Compares every loss, which depends on all samples until its step."""
    for column in ("step", "batch_size", "lr"):
        np.testing.assert_array_equal(received[column], expected[column])
    np.testing.assert_allclose(received["loss"], expected["loss"], rtol=2e-3, atol=2e-4)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> pd.DataFrame:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with Run(folder) as run:
        run.ends()
    return history(folder)


@pytest.mark.parametrize("num_kills", [
    pytest.param(1, marks=of_torch_alone), pytest.param(20, marks=pytest.mark.slow),
])  # fmt: skip
def test_killed_at_any_moment_it_ends_the_same(num_kills, undisturbed, tmp_path):
    """It saves every other update, and is resumed on another number of replicas."""
    folder, at = tmp_path / "run", random.Random(2)
    steps_between = len(undisturbed) / num_kills
    for kills in range(num_kills + 1):
        before = num_updates(folder)
        with Run(folder, "--checkpoint-steps", 2, replicas=1 + kills % 3) as run:
            if kills == num_kills:
                run.ends()
            else:
                # Some kills come before the first update; all leave something to do.
                until = time.monotonic() + 8.0 * at.random()
                goal = before + at.randrange(1, int(steps_between) - 1)
                while time.monotonic() < until and num_updates(folder) < goal:
                    time.sleep(0.002)
                assert run.process.poll() is None, run.output
                run.kill()
        # Nothing that was saved is lost, even if the run was killed as it started.
        if began := re.findall(r"resuming .*: (\d+) updates", run.output):
            assert int(began[-1]) == before
        else:  # it loaded nothing
            assert before in (0, num_updates(folder))
        assert "damaged" not in run.output
        for file in files.saved_files(folder):
            assert file.is_whole()
    assert_same_training(history(folder), undisturbed)


@of_torch_alone
def test_a_signal_to_all_processes_spares_the_loader_s_workers(tmp_path):
    """As a machine that shuts down; a worker that died would end the training."""
    endless = ("--epochs", 10_000, "--num-workers", 2)
    with Run(tmp_path / "run", *endless) as run:
        run.wait_for_update(1)
        for pid in run.pids:
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)  # in which a death is noticed
        run.ends(143)
    assert "DataLoader worker" not in run.output
    assert "received SIGTERM. Started again, the run continues from" in run.output
    assert "Traceback" not in run.output


def node(folder: Path, port: int) -> Run:
    settings = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"
    torchrun = (
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1",
        "--nnodes", "2:3", "--max_restarts", "9", "--rdzv_id", "elastic",
        "--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}",
        "--rdzv_conf", settings,
    )  # fmt: skip
    arguments = ("--epochs", 60, "--checkpoint-steps", 2, "--device", "cpu")
    # Otherwise a node that joins later never learns the address of the others.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Run(folder, *arguments, replicas=None, command=torchrun, **variables)


@pytest.mark.slow
def test_under_torchrun_it_resumes_with_the_workers_there_are(tmp_path):
    """Three nodes, then two because one dies, then three because one joins."""
    whole, folder, port = tmp_path / "whole", tmp_path / "run", free_port()
    with Run(whole, "--epochs", 60) as run:
        run.ends()
    nodes: list[Run] = []
    with contextlib.ExitStack() as all_nodes:
        for number in range(4):
            if number == 3:
                nodes[0].wait_for_update(4)
                nodes[2].kill()
                nodes[0].wait_for_update(num_updates(folder) + 4)
            nodes.append(all_nodes.enter_context(node(folder, port)))
            wait_for_server(port)  # the first node serves the rendezvous
        for each in (nodes[0], nodes[1], nodes[3]):
            each.ends()
    assert_same_training(history(folder), history(whole))
    # How many trained together, whenever a node's worker had rank 0.
    told = "".join(node.output for node in nodes)
    worlds = re.findall(r"fake, on replica 0 of (\d)", told)
    assert sorted(worlds) == ["2", "3", "3"], told
