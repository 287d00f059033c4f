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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.documents import ROOT
from support.scripts import descendants, words, written
from support.xla_replica import tpu_like
from support.xla_replica.replicas import needs_xla, of_torch_alone
from support.xla_replica.torchrun import free_port, wait_for_server

from variable_batch_size.checkpoint import files

SCRIPT = ROOT / "test/variable_train_mnist.py"
# Steps of up to 64 minibatches.
ARGUMENTS = (
    "--dataset", "fake", "--epochs", "24", "--batch-size", "16", "--log-steps", "1",
    "--ref-batchsize", "64",
)  # fmt: skip
PATIENCE = 240.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1")


class Run:
    """Runs the script in other processes, all of which end with the ``with`` block."""

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        command=(sys.executable,),
        script=(SCRIPT, "--no-progress", "--checkpoint"),
        **variables,
    ) -> None:
        self.folder = folder
        self._output = folder.parent / f"output-{time.monotonic_ns()}"
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                words([*command, *script, folder, *arguments]),
                env={**kept, "OMP_NUM_THREADS": "1", **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Run:
        return self

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
        """Kills all its processes, like a dying host."""
        for pid in reversed(self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ends(self, status: int = 0) -> None:
        """Waits for the end, and asserts that it is with this exit status."""
        assert self.process.wait(PATIENCE) == status, self.output

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Waits for something that comes true while the script runs."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)

    def wait_for_update(self, number: int) -> None:
        """Waits until so many updates are saved."""
        self.wait_until(lambda: num_updates(self.folder) >= number)


def on_cpu(folder: Path, *arguments: object, replicas: int = 1) -> Run:
    """Runs it on replicas on the CPU."""
    device = ("--device", "cpu", "--num-replicas", replicas)
    return Run(folder, *ARGUMENTS, *device, *arguments)


def num_updates(folder: Path) -> int:
    saved = files.saved_files(folder)
    return saved[0].num_updates if saved else 0


def restored(output: str) -> int | None:
    """Returns the update after which a run resumed; None if it loaded nothing."""
    found = re.findall(r"resuming .*: (\d+) updates", output)
    return int(found[-1]) if found else None


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
    with on_cpu(folder) as run:
        run.ends()
    return history(folder)


@pytest.mark.parametrize(
    "num_kills",
    [pytest.param(1, marks=of_torch_alone), pytest.param(20, marks=pytest.mark.slow)],
)
def test_killed_at_any_moment_it_finishes_as_if_undisturbed(
    num_kills, undisturbed, tmp_path
):
    """It saves every other update, and is resumed on another number of replicas."""
    folder, at = tmp_path / "run", random.Random(2)
    steps_between = len(undisturbed) / num_kills
    for kills in range(num_kills + 1):
        before = num_updates(folder)
        with on_cpu(folder, "--checkpoint-steps", 2, replicas=1 + kills % 3) as run:
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
        if (began := restored(run.output)) is None:
            assert before in (0, num_updates(folder))
        else:
            assert began == before
        assert "damaged" not in run.output
        for file in files.saved_files(folder):
            file.read()  # which raises for a damaged one
    assert_same_training(history(folder), undisturbed)


def test_a_signal_to_all_processes_spares_the_loader_s_workers(tmp_path):
    """As a machine that shuts down; a worker that died would end the training."""
    endless = ("--epochs", 10_000, "--num-workers", 2)
    with on_cpu(tmp_path / "run", *endless) as run:
        run.wait_for_update(1)
        for pid in run.pids:
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)  # in which a death is noticed
        run.ends(143)
    assert "DataLoader worker" not in run.output
    assert "received SIGTERM. Started again, the run continues from" in run.output
    assert "Traceback" not in run.output


@needs_xla
@pytest.mark.xla
@pytest.mark.slow
def test_asked_to_stop_eight_replicas_save_and_resume_to_their_target(tmp_path):
    folder = tmp_path / "run"
    digits = ("--dataset", "digits", "--epochs", 12, "--device", "xla")
    with Run(folder, *digits, "--num-replicas", 8) as run:
        run.wait_for_update(1)  # saved at the end of the first epoch
        os.kill(run.process.pid, signal.SIGTERM)
        run.ends(143)
    assert "Traceback" not in run.output  # of a thread that writes for TensorBoard
    newest = files.saved_files(folder)[0]
    sampler = torch.load(newest.path)["optimizer"]["elastic"]["sampler"]
    assert sampler["step"] > 0  # within an epoch, where only the signal saves
    with Run(folder, *digits, "--num-replicas", 3, "--target-accuracy", 95) as run:
        run.ends()
    assert restored(run.output) == newest.num_updates
    assert history(folder)["step"].tolist() == list(range(len(history(folder))))


@needs_xla
@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.tpu_like
def test_on_chips_a_replica_dies_and_all_are_stopped_and_it_ends_the_same(
    undisturbed, tmp_path
):
    folder = tmp_path / "run"
    for what in ("dies", "is asked to stop"):
        (tmp_path / what).mkdir()
        before, chips = num_updates(folder), tpu_like.environment(2, tmp_path / what)
        with Run(folder, *ARGUMENTS, "--checkpoint-steps", 2, **chips) as run:
            run.wait_for_update(before + 4)
            if what == "dies":
                os.kill(run.pids[-2], signal.SIGKILL)
                run.ends(1)
                assert "died (signal 9)" in run.output
            else:
                os.kill(run.process.pid, signal.SIGTERM)
                run.ends(143)
                assert "Started again, the run continues from" in run.output
    with on_cpu(folder) as run:
        run.ends()
    assert restored(run.output) >= 8
    assert_same_training(history(folder), undisturbed)


class Node(Run):
    """A node of an elastic job, with one worker."""

    def __init__(self, folder: Path, port: int) -> None:
        settings = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"
        super().__init__(
            folder, *ARGUMENTS, "--epochs", 60, "--checkpoint-steps", 2,
            "--device", "cpu",
            command=(
                *TORCHRUN, "--nnodes", "2:3", "--max_restarts", "9", "--rdzv_id",
                "elastic", "--rdzv_backend", "c10d", "--rdzv_endpoint",
                f"localhost:{port}", "--rdzv_conf", settings,
            ),
            # Otherwise a node that joins later never learns the address of the others.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )  # fmt: skip

    @property
    def worlds(self) -> list[int]:
        """How many workers trained together, whenever this node's had rank 0."""
        return [int(n) for n in re.findall(r"fake, on replica 0 of (\d)", self.output)]


@pytest.mark.slow
def test_under_torchrun_it_resumes_with_the_workers_there_are(tmp_path):
    """Three nodes, then two because one dies, then three because one joins."""
    whole, folder, port = tmp_path / "whole", tmp_path / "run", free_port()
    with Run(whole, *ARGUMENTS, "--epochs", 60, "--device", "cpu") as run:
        run.ends()
    nodes: list[Node] = []
    with contextlib.ExitStack() as all_nodes:

        def join() -> None:
            nodes.append(all_nodes.enter_context(Node(folder, port)))
            wait_for_server(port)  # the first node serves the rendezvous

        for _ in range(3):
            join()
        nodes[0].wait_for_update(4)
        nodes[2].kill()
        nodes[0].wait_for_update(num_updates(folder) + 4)
        join()
        for node in (nodes[0], nodes[1], nodes[3]):
            node.ends()
    assert_same_training(history(folder), history(whole))
    worlds = [world for node in nodes for world in node.worlds]
    assert sorted(worlds) == [2, 3, 3], [node.output for node in nodes]


# On a CPU whose tensors are read as a GPU's are: not by everybody at every update.
ON_GPUS = """
import dataclasses, sys, time
from pathlib import Path
import torch, xla_replica
from support.variable_batch_size.checkpointed import CASE, Training
from xla_replica import Replica

Replica.is_host = property(lambda self: False)
Replica.has_streams = property(lambda self: True)
Replica.wait = lambda self: None
Replica.rng_state = lambda self: torch.get_rng_state()
Replica.loader = lambda self, loader: loader  # which would pin memory
Replica.fetch_later = lambda self, tensor: (lambda copy=tensor.clone(): copy)

def train(rank, folder):
    endless = dataclasses.replace(CASE, epochs=10**9)
    training = Training(Path(folder), endless, every_updates=None, every_minutes=9)

    def tell(update):
        if xla_replica.stop_requested() is None:
            Path(folder, f"not-asked-{rank}").write_text(str(update.step + 1))
        time.sleep(0.5)

    training.optimizer.attach(tell)
    training.train()

xla_replica.launch(train, (sys.argv[1],), device="cpu")
"""


@pytest.mark.slow
def test_one_preempted_node_of_two_is_saved_within_two_updates(tmp_path):
    """Its agent kills the worker 30 seconds after the signal: 60 updates here."""
    folder, script = tmp_path / "run", written(tmp_path, ON_GPUS)
    folder.mkdir()
    common = (*TORCHRUN, "--nnodes", "2", "--master_port", free_port(), "--node_rank")
    path = f"{ROOT / 'test'}:{ROOT}"
    with contextlib.ExitStack() as nodes:
        first, second = (
            nodes.enter_context(
                Run(folder, command=(*common, n), script=(script,), PYTHONPATH=path)
            )
            for n in range(2)
        )
        second.wait_until((folder / "not-asked-1").exists)
        os.kill(second.process.pid, signal.SIGTERM)
        for agent in (first, second):
            assert agent.process.wait(PATIENCE) != 0
    last_before = int((folder / "not-asked-1").read_text())
    assert last_before <= num_updates(folder) <= last_before + 2, second.output
