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
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn

DESCRIPTION = "pool.json"


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

    def load(self, number: int) -> np.ndarray | None:
        """The scores of a part, or None if it is yet to be scored."""
        if self.folder is None or not self._path(number).exists():
            return None
        start, stop = self.interval(number)
        scores = np.load(self._path(number))
        if scores.shape != (stop - start,):
            raise ValueError(
                f"{self._path(number)} holds {scores.shape} scores for "
                f"{stop - start} samples; delete it to score them again"
            )
        return scores

    def save(self, number: int, scores: np.ndarray) -> None:
        """Keeps the scores of a part, all or nothing."""
        if self.folder is None:
            return
        path = self._path(number)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        with open(unfinished, "wb") as file:
            np.save(file, scores)
        unfinished.replace(path)

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
        if path.exists():
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
            return
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        unfinished.replace(path)

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"part-{number:08d}.npy"


def fingerprint(models: Iterable[nn.Module]) -> str:
    """A hash of all parameters and buffers: of which model scores are."""
    digest = hashlib.sha256()
    for model in models:
        for name, value in model.state_dict().items():
            digest.update(name.encode())
            if isinstance(value, torch.Tensor):
                host = value.detach().cpu().contiguous()
                digest.update(str((host.dtype, tuple(host.shape))).encode())
                digest.update(host.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
