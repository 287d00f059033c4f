"""The parts of a pool that are computed already: files that survive a kill.

A part is an interval of indices, whatever the batch size and the number of replicas, in
a separate file that appears in one piece. Beside them lies a description of what was
computed: the parts of another model or score are an error.

A file of a part is that of ``np.save``, followed by a SHA-256 of the description, the
part's number and the CRC-32 of what ``np.save`` has written. So a part of another pool
is not accepted, and of 2^32 damaged files one is.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import io
import json
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xla_replica.common.differences import differences
from xla_replica.common.files import UNFINISHED, rename, unfinished_name, write_whole

DESCRIPTION = "pool.json"
# Counts changes after which earlier folders cannot be continued.
FORMAT = 6
_DAMAGED = ".damaged"
# How many differences a message has.
_FEW = 5
_ANOTHER = "Give another folder, or delete this one."
_CHECKSUM_BYTES = hashlib.sha256().digest_size


@dataclasses.dataclass(frozen=True)
class Parts:
    """Intervals of ``size`` of a pool's ``count`` indices; no folder keeps none.

    Attributes:
        description: What is computed, besides that: names and values for JSON.
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

    def mapped(self, number: int) -> np.ndarray:
        """Returns a part's numbers, mapped into memory; no checksum is computed."""
        return np.load(self._path(number), mmap_mode="r", allow_pickle=False)

    def is_intact(self, number: int) -> bool:
        """Returns whether a part has its checksum; reads all of it."""
        path = self._path(number)
        if not path.is_file():  # a folder has taken its place
            return False
        content = memoryview(path.read_bytes())
        crc = zlib.crc32(content[:-_CHECKSUM_BYTES])
        return self._checksum(number, crc) == content[-_CHECKSUM_BYTES:]

    def set_aside(self, number: int) -> None:
        """Renames a damaged file, with a warning, so that it can be computed again."""
        path = self._path(number)
        aside = rename(path, path.with_suffix(_DAMAGED))
        warnings.warn(
            f"{path} is damaged: its content is not what was written; it is now "
            f"{aside.name}, and its samples are scored again",
            stacklevel=5,
        )

    def write(self, number: int, rows: np.ndarray) -> None:
        """Writes a part, ``(samples, *width)`` float32, once all of it is on the disk.

        Raises:
            OSError: It cannot be written; the message says what to do.
        """
        file = io.BytesIO()
        np.save(file, rows)
        content = file.getbuffer()
        checksum = self._checksum(number, zlib.crc32(content))
        self._write(self._path(number), [content, checksum])

    def unfinished(self) -> list[Path]:
        """Returns what is being written, or was when a run was killed."""
        assert self.folder is not None
        names = ("part-*", DESCRIPTION)
        return [p for n in names for p in self.folder.glob(f"{n}.*{UNFINISHED}")]

    def describe(self) -> None:
        """Writes what is computed, or checks that the folder is for the same."""
        if self.folder is None:
            return
        path = self.folder / DESCRIPTION
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise NotADirectoryError(
                errno.ENOTDIR,
                "folder= is a file, or below one; give the path of a folder",
                str(self.folder),
            ) from error
        if not path.exists():
            self._write(path, [self._text])
        # Read it also if it has just been written: maybe by another replica or job.
        try:
            saved = json.loads(path.read_bytes())
        except (ValueError, RecursionError, IsADirectoryError) as error:
            raise ValueError(f"{path} is damaged ({error}). {_ANOTHER}") from error
        own = json.loads(self._text)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise ValueError(
                f"{self.folder} was written by another version of per_sample_grad, "
                f"whose folders are not of format {FORMAT}. {_ANOTHER}"
            )
        found = differences(saved, own, {name: name for name in {**own, **saved}})
        if found:
            more = f"; and {len(found) - _FEW} more" if len(found) > _FEW else ""
            raise ValueError(
                f"{self.folder} holds scores of something else: "
                f"{'; '.join(found[:_FEW])}{more}. {_ANOTHER}"
            )

    @functools.cached_property
    def _text(self) -> bytes:
        own = {"format": FORMAT, "count": self.count, "part_size": self.size}
        return json.dumps({**own, **self.description}, indent=1).encode()

    def _checksum(self, number: int, crc: int) -> bytes:
        return hashlib.sha256(self._text + b"%d %d" % (number, crc)).digest()

    def _write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        """Writes a file that appears in one piece; an OSError says what to do."""
        unfinished = unfinished_name(path)
        try:
            write_whole(unfinished, lambda file: file.writelines(pieces), path)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}. The parts that are finished are kept: call "
                "score_pool again with the same folder as soon as it can be written",
                str(path),
            ) from error

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
