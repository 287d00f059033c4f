"""One file for a run that saves itself: a loop of your own, without a wrapper."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from variable_batch_size.checkpoint.files import (
    UNFINISHED,
    CheckpointError,
)
from xla_replica.common.differences import differences
from xla_replica.common.files import write_whole


def write_checkpoint(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes a state in place of the one before, on replica 0 alone.

    For a loop without an `ElasticOptimizer`; with one, see `Checkpointer`. A crash at
    any moment leaves the file that was there before.

    Args:
        path: The file; its folder is made if missing.
        state: Tensors on the CPU (see `xla_replica.Replica.to_host`) and plain values.
            Under ``"settings"``, what a run must have in common with this one to go on
            with it, by name.

    Raises:
        OSError: It cannot be written.
    """
    path = Path(path)

    def write(file: BinaryIO) -> Path:
        torch.save(state, file)
        return path

    write_whole(path.with_suffix(UNFINISHED), write)


def read_checkpoint(
    path: str | Path, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `write_checkpoint` wrote, with all tensors on the CPU.

    Args:
        path: The file.
        settings: Of this run, to be compared with the saved ``"settings"``.

    Raises:
        ValueError: It is of a run with other settings; all differences are listed.
        CheckpointError: It is damaged, or has more than tensors and plain values.
        OSError: It cannot be read.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    found = differences(state.get("settings", {}), settings or {})
    if found:
        raise ValueError(f"{path} is of another run: {'; '.join(found)}")
    return state
