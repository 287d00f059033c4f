"""Checkpoints of models that FSDP2 shards, loaded on other numbers of processes."""

import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.variable_batch_size.checkpointed import Hostile
from support.variable_batch_size.elastic import Case
from support.variable_batch_size.sharded import TRACE, Run, Training, whole
from support.xla_replica.replicas import Backend, of_torch_alone
from torch.testing import assert_close

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.checkpoint import files, shards

CASE = Case(TRACE, epochs=2, optimizer="adamw", rule="root", max_grad_norm=1.0)
RUN = Run(CASE, (("noise", True),))
EXACT = Run(CASE, (("noise", True),), exact=True)


def resumed(rank: int, folder: Path, stop_at=None, die_at=None, run=RUN):
    """Trains from the newest checkpoint on, and saves after every third update.

    The run is asked to stop in the update of step ``stop_at``, or the last process is
    killed in that of ``die_at``.
    """
    torch.set_num_threads(1)
    number = xla_replica.current().num_replicas
    training = Training(run, (number,) if number > 1 else None)
    checkpointer = vbs.Checkpointer(
        folder, training.optimizer, every_updates=3, model=training.model
    )
    checkpointer.load()
    num_restored = checkpointer.num_updates

    def after_update(update: vbs.Update) -> None:
        if update.step == stop_at and rank == 0:
            xla_replica.request_stop("test", 75)
        if update.step == die_at and rank == number - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    for each in (after_update, checkpointer):
        training.optimizer.attach(each)
    training.train()
    return {
        "weights": whole(training.model.parameters()),
        "progress": training.optimizer.noise.progress,
        "steps": training.steps,
        "samples": training.counted,
        "num_updates": num_restored,
    }


def run_on(num_replicas: int, folder: Path, *args: Any) -> Any:
    return Backend("cpu", num_replicas).run(resumed, folder, *args)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    return resumed(0, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A folder of a run that two processes have stopped after update 6."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(xla_replica.Stopped):
        run_on(2, folder, 4)
    return folder


def check(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    # Every step after a resumption has the samples that one process gives it.
    first = found[0]["steps"][0]
    expected = [one for one in alone["samples"] if one[0] >= first]
    together = [one for outcome in found for one in outcome["samples"]]
    assert sorted(together) == sorted(expected)
    for outcome in found:
        assert outcome["steps"][-1] == alone["steps"][-1]
        assert_close(outcome["weights"], alone["weights"], rtol=0, atol=1e-10)
        assert outcome["progress"] == pytest.approx(alone["progress"], rel=1e-9)


@of_torch_alone
def test_three_processes_and_one_continue_what_two_have_saved(stopped, alone, tmp_path):
    check([resumed(0, shutil.copytree(stopped, tmp_path / "copy"))], alone)
    found = run_on(3, shutil.copytree(stopped, tmp_path, dirs_exist_ok=True))
    assert found[0]["num_updates"] == 6
    check(found, alone)
    # Of the files, those of the checkpoints that are kept are left.
    kept = {file.num_updates for file in files.saved_files(tmp_path)}
    assert len(kept) == 3
    assert {int(path.name.split("-")[1]) for path in tmp_path.glob("*.shards")} == kept


def test_exact_sums_have_the_same_bits_where_another_number_continues(tmp_path):
    undisturbed = resumed(0, tmp_path / "alone", run=EXACT)
    with pytest.raises(xla_replica.Stopped):
        run_on(2, tmp_path, 4, None, EXACT)
    found = resumed(0, tmp_path, run=EXACT)
    assert found["num_updates"] >= 5
    assert all(map(torch.equal, found["weights"], undisturbed["weights"]))


def test_damaged_shards_make_the_checkpoint_before_count(stopped, tmp_path, caplog):
    folder = shutil.copytree(stopped, tmp_path / "copy")
    newest, before = files.saved_files(folder)
    name = files.load(newest.path)["shards"]
    part = sorted((folder / name).glob("*.distcp"))[1]
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert files.newest_whole(folder) == before.path
    assert f"{name}/{part.name} is missing or has changed" in caplog.text
    next(folder.glob(f"update-{before.num_updates:08d}-*.shards/*.distcp")).unlink()
    with pytest.raises(vbs.CheckpointError, match="all 2 checkpoints"):
        files.newest_whole(folder)


def test_nothing_of_the_shards_is_run(stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "copy")
    state = files.load(files.saved_files(folder)[0].path)
    metadata = folder / state["shards"] / ".metadata"
    metadata.write_bytes(pickle.dumps(Hostile(tmp_path / "hostile")))
    with pytest.raises(OSError, match=r"distributed\.checkpoint"):
        shards.fill(folder, state, xla_replica.LocalReplica("cpu"), [])
    assert not (tmp_path / "hostile").exists()


@pytest.mark.slow
def test_killed_and_resumed_on_four_two_and_three(alone, tmp_path):
    for num_replicas, die_at in ((4, 7), (2, 13)):
        with pytest.raises(xla_replica.ReplicaError):
            run_on(num_replicas, tmp_path, None, die_at)
    found = run_on(3, tmp_path)
    assert found[0]["num_updates"] == 12
    check(found, alone)
