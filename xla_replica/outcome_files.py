"""Results and exceptions of replicas that are processes, passed on through files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from xla_replica.loader import to_device

logger = logging.getLogger(__name__)


def write_result(folder: str, rank: int, result: Any) -> None:
    """Writes what replica ``rank`` returned, its tensors on the CPU."""
    path = Path(folder, f"{rank:06d}.result")
    torch.save(to_device(result, torch.device("cpu")), path)


def read_results(folder: str) -> list[Any]:
    """What the replicas returned, by rank."""
    return [_load(path) for path in sorted(Path(folder).glob("*.result"))]


def write_failure(folder: str, rank: int, error: Exception) -> None:
    """Writes the exception of replica ``rank``, if it can be pickled."""
    try:
        torch.save(error, Path(folder, f"{rank}.failure"))
    except Exception:  # pickle raises many kinds; the traceback's text still travels
        logger.debug("the exception of replica %d cannot be pickled", rank)


def read_failure(folder: str, rank: int) -> Exception | None:
    """The exception of replica ``rank``, or None if it did not get through."""
    try:
        return _load(Path(folder, f"{rank}.failure"))
    except Exception:  # absent, half-written or not importable here
        return None


def _load(path: Path) -> Any:
    # Files of our own replicas, from this very call: any picklable value is meant.
    return torch.load(path, weights_only=False)
