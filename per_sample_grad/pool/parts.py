"""The parts of a pool that are scored already: files that survive a kill.

A part is an interval of indices, whatever the batch size and the number of replicas, in
a file of its own that appears in one piece. Beside them a description of what was
scored: another model's or score's parts are an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

DESCRIPTION = "pool.json"
_UNFINISHED = ".tmp"


@dataclasses.dataclass(frozen=True)
class Parts:
    """Intervals of ``size`` indices of a pool of ``count`` samples.

    Attributes:
        count: Samples in the pool.
        size: Samples in a part; the last may have fewer.
        folder: Where they are kept; None: nowhere.
    """

    count: int
    size: int
    folder: Path | None

    def __len__(self) -> int:
        return -(-self.count // self.size)

    def interval(self, number: int) -> tuple[int, int]:
        """First index and the one after the last."""
        return number * self.size, min((number + 1) * self.size, self.count)

    def kept(self) -> np.ndarray:
        """``(number of parts,)`` bool: which are in the folder."""
        if self.folder is None:
            return np.zeros(len(self), dtype=bool)
        return np.array([self._path(n).exists() for n in range(len(self))], dtype=bool)

    def load(self, number: int) -> np.ndarray:
        """The scores of a part in the folder: float32.

        Raises:
            ValueError: The file holds something else.
        """
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
        if self.folder is None:
            return
        path = self._path(number)
        unfinished = _unfinished(path)
        with open(unfinished, "wb") as file:
            np.save(file, scores)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def clear_unfinished(self) -> None:
        """Deletes what a killed run was writing; before any replica writes a part."""
        if self.folder is not None:
            for path in self.folder.glob(f"part-*{_UNFINISHED}"):
                path.unlink(missing_ok=True)

    def describe(self, description: dict[str, object]) -> None:
        """Writes what is being scored, or checks that it is what was.

        Raises:
            ValueError: The folder holds something else's parts.
        """
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / DESCRIPTION
        wanted = {**description, "count": self.count, "part_size": self.size}
        if not path.exists():
            unfinished = _unfinished(path)
            unfinished.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
            unfinished.replace(path)
        # Also when it has just been written: by another replica or job, perhaps.
        found = json.loads(path.read_text(encoding="utf-8"))
        differing = sorted(
            key for key in {*found, *wanted} if found.get(key) != wanted.get(key)
        )
        if differing:
            raise ValueError(
                f"{self.folder} holds scores of something else: "
                + ", ".join(
                    f"{key} was {found.get(key)!r} and is {wanted.get(key)!r}"
                    for key in differing
                )
                + "; give another folder, or delete this one"
            )

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"part-{number:08d}.npy"


def deal(kept: np.ndarray, rank: int) -> tuple[list[int], list[int]]:
    """Parts that this replica reads, and those that it scores.

    A part is read by the first replica that sees it, and scored where none does. The
    missing ones are dealt in turn, so that all have as many, but for one.

    Args:
        kept: ``(num_replicas, number of parts)`` bool: who sees which.
        rank: Of this replica.

    >>> kept = np.array([[False, True, False, False], [False, True, False, True]])
    >>> deal(kept, 0), deal(kept, 1)
    (([1], [0]), ([3], [2]))
    """
    somewhere = kept.any(axis=0)
    read = np.flatnonzero(somewhere & (kept.argmax(axis=0) == rank))
    missing = np.flatnonzero(~somewhere)
    return read.tolist(), missing[rank :: len(kept)].tolist()


def _unfinished(path: Path) -> Path:
    """A name of its own: replicas may be threads, or machines with the same pids."""
    return path.with_suffix(f".{uuid.uuid4().hex}{_UNFINISHED}")


def fingerprint(models: Iterable[nn.Module]) -> str:
    """A hash of the kinds of modules and of all values: of which model scores are."""
    digest = hashlib.sha256()
    for model in models:
        for name, module in model.named_modules():
            digest.update(f"{name} {type(module).__qualname__};".encode())
        for name, value in model.state_dict().items():
            digest.update(name.encode())
            if isinstance(value, torch.Tensor):
                host = value.detach().cpu().contiguous()
                digest.update(str((host.dtype, tuple(host.shape))).encode())
                digest.update(host.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def shapes_digest(models: Iterable[Mapping[str, torch.Tensor]]) -> str:
    """A hash of the names and shapes of parameters."""
    found = [
        [(name, tuple(p.shape)) for name, p in params.items()] for params in models
    ]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def name_of(function: Callable[..., Any]) -> str:
    """Module and name of a function, or of the type of what is called like one."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def pool_digest(dataset: Any) -> str | None:
    """A hash of the first, middle and last item; None if an item is drawn at random."""
    indices = sorted({0, len(dataset) // 2, len(dataset) - 1}) if len(dataset) else []
    digests = []
    with torch.random.fork_rng(devices=[]):  # scoring draws what it would have drawn
        for _ in range(2):
            digest = hashlib.sha256()
            for index in indices:
                _update(digest, dataset[index])
            digests.append(digest.hexdigest())
    return digests[0] if digests[0] == digests[1] else None


def _update(digest: Any, value: Any) -> None:
    digest.update(type(value).__qualname__.encode())
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        digest.update(str((host.dtype, tuple(host.shape))).encode())
        digest.update(host.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _update(digest, key)
            _update(digest, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _update(digest, item)
    elif isinstance(value, str | int | float | complex):
        digest.update(repr(value).encode())
    elif isinstance(value, bytes):
        digest.update(value)
    elif hasattr(value, "tobytes"):  # arrays, images
        digest.update(str(getattr(value, "shape", None)).encode())
        digest.update(value.tobytes())
