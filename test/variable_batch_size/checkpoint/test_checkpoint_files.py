"""Files of checkpoints are whole or not there, and every change is noticed."""

import hashlib
import io
import os
import random
import re
import traceback
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from support.variable_batch_size.checkpointed import Hostile, full_disk

import variable_batch_size as vbs
from variable_batch_size.checkpoint import files

STATE = {"settings": {"lr": 0.1, "seed": 1}, "weights": torch.arange(5.0)}


def state(number: int) -> dict:
    generator = torch.Generator().manual_seed(number)
    weights = torch.randn(40, 7, generator=generator)
    return {"number": number, "weights": weights, "names": ["a", "b"]}


def test_a_file_can_be_read_with_and_without_us(tmp_path, caplog):
    path = files.write(tmp_path / "new" / "folder", 7, state(7))
    assert files.newest_whole(path.parent) == path
    assert not caplog.records
    assert [file.num_updates for file in files.saved_files(path.parent)] == [7]
    for loaded in (files.load(path, mapped=True), torch.load(path)):
        assert loaded["number"] == 7
        assert torch.equal(loaded["weights"], state(7)["weights"])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_state_that_is_read_takes_no_memory_of_its_own(tmp_path):
    def own_kilobytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])

    path = files.write(tmp_path, 1, {"weights": torch.ones(32, 2**20)})
    content, before = path.read_bytes()[:4096], own_kilobytes()
    [file] = files.saved_files(tmp_path)
    assert file.is_whole()
    state = files.load(path, mapped=True)
    assert state["weights"].sum() == 2**25
    assert own_kilobytes() - before < 2**14  # of 2**17
    state["weights"].zero_()
    assert path.read_bytes()[:4096] == content


def test_an_empty_folder_and_none_have_no_checkpoint(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("other files do not matter")
    os.mkfifo(tmp_path / f"update-00000002-{'0' * 32}.pt")  # nor is a pipe
    for name in (".", "none", "notes"):
        assert files.newest_whole(tmp_path / name) is None


def test_the_last_one_written_of_an_update_counts(tmp_path):
    first = files.write(tmp_path, 3, state(3))
    os.utime(first, ns=(1, 1))
    second = files.write(tmp_path, 3, state(4))
    assert files.newest_whole(tmp_path) == second


def damaged(content: bytes, number: int) -> tuple[str, bytes]:
    at = random.Random(number)
    offset = at.randrange(len(content))
    if number % 3 == 0:
        return f"cut at {offset}", content[:offset]
    bad = bytearray(content)
    if number % 3 == 1:
        end = min(len(content), offset + at.randrange(1, 4096))
        bad[offset:end] = bytes(end - offset)
        return f"zeros from {offset} to {end}", bytes(bad)
    bad[offset] ^= 1 << at.randrange(8)
    return f"a bit at {offset}", bytes(bad)


def test_every_damage_is_found_and_the_one_before_is_used(tmp_path, caplog):
    before, newest = (files.write(tmp_path, n, state(n)) for n in (1, 2))
    content = newest.read_bytes()
    # Not those where zeros are replaced by zeros.
    cases = [case for n in range(450) if (case := damaged(content, n))[1] != content]
    assert len(cases) > 300
    for what, bad in cases:
        newest.write_bytes(bad)
        caplog.clear()
        assert files.newest_whole(tmp_path) == before, what
        assert f"{newest.name} is damaged" in caplog.text
        assert newest.read_bytes() == bad
    before.write_bytes(b"nothing")
    for _ in range(2):  # a second attempt must not begin anew
        with pytest.raises(vbs.CheckpointError, match="all 2 checkpoints"):
            files.newest_whole(tmp_path)


@pytest.mark.parametrize("kind", ["update", "best", "single"])
def test_nothing_of_a_hostile_file_is_run_nor_advice_given_to(kind, tmp_path, caplog):
    """Its name fits its content, as an attacker would see to."""
    before = files.write(tmp_path, 1, state(1), is_best=True)
    content = io.BytesIO()
    torch.save({"version": 1, "model": Hostile(tmp_path / "proof")}, content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()[:32]
    path = tmp_path / f"{kind}-00000002-{digest}.pt"
    path.write_bytes(content.getvalue())
    if kind == "single":
        with pytest.raises(vbs.CheckpointError) as error:
            vbs.read_checkpoint(path)
        told = "".join(traceback.format_exception(error.value))
    else:
        assert files.newest_whole(tmp_path, best=kind == "best") == before
        told = caplog.text
    assert re.search(rf"{path.name} holds (posix|nt)\.system, .* nothing .* is r", told)
    assert "weights_only" not in told
    assert not (tmp_path / "proof").exists()


def test_a_file_that_cannot_be_read_now_is_not_damaged(tmp_path):
    path = files.write(tmp_path, 1, state(1))
    stale = OSError(116, "Stale file handle")
    opened = mock.patch.object(type(path), "open", side_effect=stale)
    with opened, pytest.raises(OSError, match="Stale"):
        files.newest_whole(tmp_path)
    assert files.newest_whole(tmp_path) == path


@pytest.mark.parametrize("room", [0, 500, 1500])
def test_a_disk_that_is_full_loses_nothing(tmp_path, room):
    before = files.write(tmp_path, 1, state(1))
    message = rf"File too large: '{tmp_path}/update-00000002-.*\.tmp'"
    with full_disk(room), pytest.raises(OSError, match=message):
        files.write(tmp_path, 2, state(2))
    assert files.newest_whole(tmp_path) == before
    assert list(tmp_path.iterdir()) == [before]


def test_what_others_are_writing_is_left_alone(tmp_path):
    """Until this run has come further: then it was abandoned."""
    before = files.write(tmp_path, 1, state(1))
    unfinished = tmp_path / "update-00000009-1234.tmp"
    shards = tmp_path / "update-00000009-1234.shards"
    unfinished.write_bytes(b"more to come")
    shards.mkdir()
    files.tidy(tmp_path, keep=1)
    assert {*tmp_path.iterdir()} == {before, unfinished, shards}
    newest = files.write(tmp_path, 10, state(10))
    files.tidy(tmp_path, keep=1)
    assert [*tmp_path.iterdir()] == [newest]


def test_what_is_written_is_read_by_the_same_run(tmp_path):
    path = tmp_path / "new" / "run.pt"
    vbs.write_checkpoint(path, {"step": np.int64(3)})
    assert vbs.read_checkpoint(path) == {"step": 3}
    vbs.write_checkpoint(path, STATE)  # replaces it
    assert os.listdir(path.parent) == ["run.pt"]
    for settings in ({"seed": 1, "lr": 0.1}, None):
        found = vbs.read_checkpoint(str(path), settings)
        assert found["settings"] == STATE["settings"]
        assert torch.equal(found["weights"], STATE["weights"])
    for settings, message in (
        ({}, r"lr was 0\.1 and is None; seed was 1 and is None"),
        ({"seed": 1, "lr": 0.2, "width": 3}, r"lr was 0\.1 and is 0\.2; width"),
    ):
        with pytest.raises(ValueError, match=rf"another run: {message}"):
            vbs.read_checkpoint(path, settings)
    content = path.read_bytes()
    for kept in (0, 10, -50):
        path.write_bytes(content[:kept])
        with pytest.raises(vbs.CheckpointError, match=r"run\.pt cannot be loaded"):
            vbs.read_checkpoint(path, STATE["settings"])
