"""`Checkpointer(asynchronous=True)`: files are written beside the training, whole."""

import contextlib
import dataclasses
import logging
import random
import re
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.variable_batch_size.checkpointed import (
    CASE,
    Part,
    Training,
    counted,
    full_disk,
    train,
)
from support.xla_replica.replicas import TORCHTPU, row
from torch import nn

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.checkpoint import files
from xla_replica.starting import child_process

PATIENCE = 60.0
# Adam's count of steps is on the host also where the weights are on a device.
ADAM = dataclasses.replace(CASE, optimizer="adamw", rule="root")


class SlowDisk:
    """Replaces `files.write` by one that waits until it may go on."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.entered, self.may_go_on = threading.Event(), threading.Event()

    def write(self, *args, write=files.write) -> Path:
        self.events.append("writing")
        self.entered.set()
        assert self.may_go_on.wait(PATIENCE), "the training waits for the writer"
        path = write(*args)
        self.events.append("written")
        return path


def beside_the_training(rank: int, folder: Path):
    """Trains on while the first checkpoint is written, after update 4, until update 7.

    Returns what that file must hold; on replica 0, whether nothing was written then.
    """
    seen, disk = Part(set()), SlowDisk()
    training = Training(folder, ADAM, asynchronous=True, keep=9, parts={"seen": seen})
    training.optimizer.attach(lambda update: seen.value.add(update.step))
    expected, unwritten = [], []

    def look(update: vbs.Update) -> None:
        if update.step == 3:
            expected.append(training.state())
        if update.step == 6 and rank == 0:
            assert disk.entered.wait(PATIENCE)
            unwritten.append(files.saved_files(folder) == [])
            disk.may_go_on.set()

    training.optimizer.attach(look)
    # Replicas may be threads of one process, of which the first one writes.
    patched = mock.patch.object(files, "write", disk.write)
    with patched if rank == 0 else contextlib.nullcontext():
        training.train()
        path = training.checkpointer.wait()
    return expected[0], unwritten, path and path.name


@pytest.mark.parametrize(
    "backend",
    [row("cpu", 1), row("cpu", 3, slow=True), row("xla", 3, slow=True), *TORCHTPU],
)
def test_a_step_does_not_wait_and_the_state_does_not_change(backend, tmp_path):
    expected, unwritten, newest = backend.run(beside_the_training, tmp_path)[0]
    assert unwritten == [True]
    saved = files.saved_files(tmp_path)
    assert [file.num_updates for file in saved] == [24, 20, 16, 12, 8, 4]
    assert saved[0].path.name == newest
    state = saved[-1].read()
    parts, of_adam = state["parts"], state["optimizer"]["state"]
    assert parts["seen"]["value"] == {0, 1, 2, 3}
    correct = expected["model"], expected["optimizer"]["state"]
    torch.testing.assert_close((parts["model"], of_adam), correct, rtol=0, atol=0)
    assert {float(one["step"]) for one in of_adam.values()} == {4.0}


@pytest.mark.parametrize("backend", [row("xla", 1), row("xla", 3, slow=True)])
def test_it_compiles_nothing_and_transfers_as_a_synchronous_one(backend, tmp_path):
    options = {"case": ADAM, "every_updates": 8}
    runs = [options | {"asynchronous": each} for each in (False, True)]
    for synchronous, asynchronous in backend.run(counted, tmp_path, runs):
        assert asynchronous[1:] == synchronous[1:]
        assert [compilations for compilations, *_ in asynchronous[1:]] == [0, 0]


@pytest.fixture
def disk(monkeypatch) -> SlowDisk:
    disk = SlowDisk()
    monkeypatch.setattr(files, "write", disk.write)
    return disk


def test_the_next_save_waits_before_it_copies_a_state(tmp_path, monkeypatch, disk):
    training = Training(tmp_path, asynchronous=True)
    replica = training.checkpointer.replica

    def copied(state, to_host=replica.to_host):
        disk.events.append("copied")
        return to_host(state)

    monkeypatch.setattr(replica, "to_host", copied)
    assert training.checkpointer.save() is None
    assert disk.entered.wait(PATIENCE)
    threading.Timer(0.2, disk.may_go_on.set).start()
    training.checkpointer.save()
    assert training.checkpointer.wait() == files.saved_files(tmp_path)[0].path
    assert disk.events == ["copied", "writing", "written"] * 2


# An update, or one of the others.
@pytest.mark.parametrize("later", ["__call__", "save", "wait", "load"])
def test_errors_of_the_writer_reach_the_loop_once(later, tmp_path, caplog):
    training = Training(tmp_path, asynchronous=True)
    checkpointer = training.checkpointer
    with full_disk():
        checkpointer.save()
        checkpointer._thread.submit(int).result(PATIENCE)  # begins after it was told
    message = rf"File too large: '{tmp_path}/update-00000000-.*\.unfinished'"
    assert re.search(f"was not written: .*{message}", caplog.text)
    with pytest.raises(OSError, match=message):
        getattr(checkpointer, later)(*[None] * (later == "__call__"))
    assert checkpointer.wait() is None
    checkpointer.save()
    assert [checkpointer.wait()] == [f.path for f in files.saved_files(tmp_path)]


def test_a_request_to_stop_waits_for_the_file(tmp_path, disk):
    threading.Timer(0.5, disk.may_go_on.set).start()
    with pytest.raises(xla_replica.Stopped):
        train(0, tmp_path, 6, (0,), asynchronous=True, every_updates=1000)
    assert files.saved_files(tmp_path)[0].num_updates == 7


def announce(folder: str, log: Path) -> None:
    """Trains for ever, saves all the time, and tells of each checkpoint in ``log``."""

    def hesitantly(*args, save=torch.save, **options) -> None:
        save(*args, **options)
        time.sleep(0.01)  # while the end of the file is not written

    torch.save = hesitantly
    logging.basicConfig(filename=log, level=logging.INFO, format="%(message)s")
    endless = dataclasses.replace(CASE, epochs=10**9)
    options = {"asynchronous": True, "parts": {"ballast": nn.Linear(300, 300)}}
    train(0, Path(folder), case=endless, every_updates=1, **options)


def lines(log: Path, what: str) -> list[str]:
    """Returns the last word of every complete line that begins with ``what``."""
    text = log.read_text() if log.exists() else ""
    return re.findall(rf"^{what} (\S+):.*\n", text, re.MULTILINE)


@pytest.mark.parametrize("num_kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_newest_announced_one_is_whole(num_kills, tmp_path):
    folder, at = tmp_path / "run", random.Random(num_kills)
    context, announced = child_process._context("forkserver"), None
    num_unfinished = 0
    for kill in range(num_kills):
        log = tmp_path / f"log-{kill}"
        process = context.Process(target=announce, args=(str(folder), log))
        process.start()
        try:
            deadline = time.monotonic() + PATIENCE
            while not lines(log, "saved"):
                assert process.is_alive()
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(0.1 * at.random())
        finally:
            process.kill()
            process.join()
        if announced is not None:  # what was announced before is not lost
            assert Path(lines(log, "resuming")[0]).name >= announced.name
        announced = Path(lines(log, "saved")[-1])
        [file] = [file for file in files.saved_files(folder) if file.path == announced]
        file.read()  # which raises unless it is whole
        num_unfinished += len(list(folder.glob("*.unfinished")))
    if num_kills > 10:  # some were killed while they wrote
        assert num_unfinished
