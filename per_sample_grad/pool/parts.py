"""The parts of a pool that are scored already: files that survive a kill.

A part is an interval of indices, whatever the batch size and the number of replicas, in
a separate file that appears in one piece. Beside them lies a description of what was
scored: the parts of another model or score are an error.

A file of a part is that of ``np.save``, and after it a SHA-256 of the description and
the scores. It finds any damage, also a part of another pool, and the time it takes is
not noticed: a part has some kilobytes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import uuid
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from xla_replica.common.differences import differences
from xla_replica.common.files import rename, write_whole

DESCRIPTION = "pool.json"
# Counts changes after which earlier folders cannot be continued.
FORMAT = 2
_UNFINISHED = ".tmp"
_DAMAGED = ".damaged"
# How many differences from what the folder holds a message has.
_FEW = 5


@dataclasses.dataclass(frozen=True)
class Parts:
    """Intervals of ``size`` of a pool's ``count`` indices; no folder keeps none.

    Attributes:
        description: What is scored, besides that: names and values for JSON.
    """

    count: int
    size: int
    folder: Path | None
    description: dict[str, Any]

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

    def load(self, number: int) -> np.ndarray | None:
        """Returns a part's float32 scores; None if the file is damaged.

        A damaged file is renamed, with a warning, so that the part can be scored again.
        """
        path = self._path(number)
        content = path.read_bytes()
        size = hashlib.sha256().digest_size
        saved, checksum = content[:-size], content[-size:]
        if self._checksum(number, saved) == checksum:
            return np.load(io.BytesIO(saved), allow_pickle=False)
        aside = rename(path, path.with_suffix(_DAMAGED))
        warnings.warn(
            f"{path} is damaged: its content is not what was written; it is now "
            f"{aside.name}, and its samples are scored again",
            stacklevel=4,
        )
        return None

    def save(self, number: int, scores: np.ndarray) -> None:
        """Keeps the scores of a part, all or nothing, also when the power fails."""
        if self.folder is not None:
            content = io.BytesIO()
            np.save(content, scores)
            saved = content.getvalue()
            _write(self._path(number), saved + self._checksum(number, saved))

    def clear_unfinished(self) -> None:
        """Deletes what a killed run was writing; call it before any replica writes."""
        if self.folder is not None:
            for path in self.folder.glob(f"part-*{_UNFINISHED}"):
                path.unlink(missing_ok=True)

    def describe(self) -> None:
        """Writes what is being scored, or checks that the folder is for the same."""
        if self.folder is None:
            return
        path = self.folder / DESCRIPTION
        if not path.exists():
            _write(path, self._text)
        # Read it also if it has just been written: maybe by another replica or job.
        remedy = "Give another folder, or delete this one."
        try:
            saved = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}). {remedy}") from error
        if saved.get("format") != FORMAT:
            raise ValueError(
                f"{self.folder} was written by an earlier version, which kept no "
                "checksums and compared functions by name, so whether its scores are "
                f"those of this call cannot be known. {remedy}"
            )
        own = json.loads(self._text)
        found = differences(saved, own, {name: name for name in {**own, **saved}})
        if found:
            more = f"; and {len(found) - _FEW} more" if len(found) > _FEW else ""
            raise ValueError(
                f"{self.folder} holds scores of something else: "
                f"{'; '.join(found[:_FEW])}{more}. {remedy}"
            )

    @functools.cached_property
    def _text(self) -> bytes:
        own = {"format": FORMAT, "count": self.count, "part_size": self.size}
        return json.dumps({**own, **self.description}, indent=1).encode()

    def _checksum(self, number: int, saved: bytes) -> bytes:
        return hashlib.sha256(self._text + b"%d" % number + saved).digest()

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


def _write(path: Path, content: bytes) -> None:
    def write_content(file: BinaryIO) -> Path:
        file.write(content)
        return path

    # A unique name: replicas may be threads, or machines with the same process ids.
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}{_UNFINISHED}")
    try:
        write_whole(unfinished, write_content)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}. The parts that are finished are kept: call score_pool "
            "again with the same folder as soon as it can be written",
            str(path),
        ) from error
