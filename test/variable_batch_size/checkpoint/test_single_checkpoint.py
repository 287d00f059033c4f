"""`write_checkpoint` and `read_checkpoint`: one file for a loop that saves itself."""

from __future__ import annotations

import os

import pytest
import torch

import variable_batch_size as vbs

STATE = {"settings": {"lr": 0.1, "seed": 1}, "weights": torch.arange(5.0)}


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "run.pt"
    for _ in range(2):  # the second replaces the first
        vbs.write_checkpoint(path, STATE)
    found = vbs.read_checkpoint(str(path), {"seed": 1, "lr": 0.1})
    assert found["settings"] == STATE["settings"]
    assert torch.equal(found["weights"], STATE["weights"])
    assert os.listdir(path.parent) == ["run.pt"]


def test_another_run_is_refused_with_all_differences(tmp_path):
    path = tmp_path / "run.pt"
    vbs.write_checkpoint(path, {"step": 3})
    assert vbs.read_checkpoint(path) == {"step": 3}
    vbs.write_checkpoint(path, STATE)
    assert vbs.read_checkpoint(path)["settings"] == STATE["settings"]
    for settings, message in (
        ({}, r"lr was 0\.1 and is None; seed was 1 and is None"),
        ({"seed": 1, "lr": 0.2, "width": 3}, r"lr was 0\.1 and is 0\.2; width"),
    ):
        with pytest.raises(ValueError, match=rf"another run: {message}"):
            vbs.read_checkpoint(path, settings)


@pytest.mark.parametrize("kept", [0, 10, -50])
def test_a_damaged_one_is_named(kept, tmp_path):
    path = tmp_path / "run.pt"
    vbs.write_checkpoint(path, STATE)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(vbs.CheckpointError, match=r"run\.pt cannot be loaded"):
        vbs.read_checkpoint(path, STATE["settings"])
