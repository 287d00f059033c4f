"""The parts of a pool that are scored already: files that survive a kill.

A part is an interval of indices, whatever the batch size and the number of replicas, in
a separate file that appears in one piece. Beside them lies a description of what was
scored: the parts of another model or score are an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from xla_replica.common.differences import check_same
from xla_replica.common.files import write_whole

DESCRIPTION = "pool.json"
_UNFINISHED = ".tmp"


@dataclasses.dataclass(frozen=True)
class Parts:
    """Intervals of ``size`` of a pool's ``count`` indices; no folder keeps none."""

    count: int
    size: int
    folder: Path | None

    def __len__(self) -> int:
        return -(-self.count // self.size)

    def interval(self, number: int) -> tuple[int, int]:
        """Returns the first index of a part and the one after its last."""
        return number * self.size, min((number + 1) * self.size, self.count)

    def kept(self) -> np.ndarray:
        """Returns which parts are in the folder: ``(number of parts,)`` bool."""
        if self.folder is None:
            return np.zeros(len(self), dtype=bool)
        return np.array([self._path(n).exists() for n in range(len(self))], dtype=bool)

    def load(self, number: int) -> np.ndarray:
        """Returns a part's float32 scores; a file of anything else is a ValueError."""
        path, (start, stop) = self._path(number), self.interval(number)
        try:
            scores = np.load(path, allow_pickle=False)
            found = f"{scores.shape} scores of {scores.dtype}"
        except (ValueError, EOFError) as error:
            scores, found = None, f"no scores ({error})"
        if scores is None or scores.shape != (stop - start,) or scores.dtype != "f4":
            raise ValueError(
                f"{path} holds {found} instead of {stop - start} of float32; delete it "
                "to score them again"
            )
        return scores

    def save(self, number: int, scores: np.ndarray) -> None:
        """Keeps the scores of a part, all or nothing, also when the power fails."""
        if self.folder is not None:
            _write(self._path(number), lambda file: np.save(file, scores))

    def clear_unfinished(self) -> None:
        """Deletes what a killed run was writing; call it before any replica writes."""
        if self.folder is not None:
            for path in self.folder.glob(f"part-*{_UNFINISHED}"):
                path.unlink(missing_ok=True)

    def describe(self, description: dict[str, object]) -> None:
        """Writes what is being scored, or checks that the folder is for the same."""
        if self.folder is None:
            return
        path = self.folder / DESCRIPTION
        wanted = {**description, "count": self.count, "part_size": self.size}
        if not path.exists():
            text = json.dumps(wanted, indent=1).encode()
            _write(path, lambda file: file.write(text))
        # Read it also if it has just been written: maybe by another replica or job.
        check_same(
            json.loads(path.read_text(encoding="utf-8")),
            wanted,
            f"{self.folder} holds scores of something else",
            "Give another folder, or delete this one.",
        )

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"part-{number:08d}.npy"


def deal(kept: np.ndarray, rank: int) -> tuple[list[int], list[int]]:
    """Returns the parts that this replica reads, and those that it scores.

    A part is read by the first replica that sees it, and scored if none does. The
    missing ones are dealt in turn, so that replicas have equally many, give or take
    one. ``kept[r, n]`` says whether replica r sees part n.

    >>> kept = np.array([[False, True, False, False], [False, True, False, True]])
    >>> deal(kept, 0), deal(kept, 1)
    (([1], [0]), ([3], [2]))
    """
    somewhere = kept.any(axis=0)
    read = np.flatnonzero(somewhere & (kept.argmax(axis=0) == rank))
    missing = np.flatnonzero(~somewhere)
    return read.tolist(), missing[rank :: len(kept)].tolist()


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    def write_content(file: BinaryIO) -> Path:
        write(file)
        return path

    # A unique name: replicas may be threads, or machines with the same process ids.
    write_whole(path.with_suffix(f".{uuid.uuid4().hex}{_UNFINISHED}"), write_content)


def name_of(function: Callable[..., Any]) -> str:
    """Returns module and name of a function, or of a callable object's type."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def model_digest(model: nn.Module) -> str:
    """Returns a hash of a model's kinds of modules and of all its values."""
    kinds = [
        (name, type(module).__qualname__) for name, module in model.named_modules()
    ]
    return digest([kinds, list(model.state_dict().items())])


def pool_digest(dataset: Any) -> str | None:
    """Returns a hash of the first, middle and last item; None if items are random."""
    indices = sorted({0, len(dataset) // 2, len(dataset) - 1}) if len(dataset) else []
    with torch.random.fork_rng(devices=[]):  # so that scoring draws the same numbers
        first, second = (digest([dataset[i] for i in indices]) for _ in range(2))
    return first if first == second else None


def digest(value: Any) -> str:
    """Returns a hash of everything in nested tuples, lists and dicts, with their keys.

    >>> digest({"image": 1, "label": 2}) == digest({"image": 1, "target": 2})
    False
    """
    found = hashlib.sha256()
    for leaf in _keys_and_leaves(value):
        found.update(type(leaf).__qualname__.encode())
        if isinstance(leaf, torch.Tensor):
            host = leaf.detach().cpu().contiguous()
            found.update(str((host.dtype, tuple(host.shape))).encode())
            found.update(host.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | int | float | complex):
            found.update(repr(leaf).encode())
        elif isinstance(leaf, bytes):
            found.update(leaf)
        elif hasattr(leaf, "tobytes"):  # arrays, images
            found.update(str(getattr(leaf, "shape", None)).encode())
            found.update(leaf.tobytes())
    return found.hexdigest()


def _keys_and_leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _keys_and_leaves(part)
    else:
        yield value
