"""The parts of a pool that are computed already: files that survive a kill.

A part is an interval of indices, whatever the batch size and the number of replicas, in
a separate file that appears in one piece. Beside them lies a description of what was
computed: the parts of another model or score are an error.

A file of a part is that of ``np.save``, and after it a SHA-256 of the description, the
part's number and the CRC-32 of what ``np.save`` has written. One damaged file in 2^32
has the same CRC-32, which takes half as long as SHA-256 of a processor that has
instructions for that, and a tenth of others; no part of another pool is taken for one
of this. (BLAKE2b takes twice as long as SHA-256 does with instructions.)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import uuid
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from xla_replica.common.differences import differences
from xla_replica.common.files import rename, write_whole

DESCRIPTION = "pool.json"
# Counts changes after which earlier folders cannot be continued.
FORMAT = 3
_UNFINISHED = ".tmp"
_DAMAGED = ".damaged"
# How many differences from what the folder holds a message has.
_FEW = 5
_ANOTHER = "Give another folder, or delete this one."
_CHECKSUM_BYTES = hashlib.sha256().digest_size
# What a CPU's cache holds, so that what is checked is also written from there.
_CHUNK_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class Contents:
    """What parts hold, in the words of messages.

    Attributes:
        what: The numbers.
        computed: What is done to samples.
        function: Who does it.
        key: A name that only their descriptions have.
    """

    what: str
    computed: str
    function: str
    key: str


SCORED = Contents("scores", "scored", "score_pool", "score")
INDEXED = Contents("projections", "projected", "index_pool", "seed")


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
    contents: Contents

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
        """Returns a part's float32 numbers; None if the file is damaged.

        A damaged file is renamed, with a warning, so that the part can be computed
        again.
        """
        path = self._path(number)
        content = memoryview(path.read_bytes())
        saved, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if self._checksum(number, zlib.crc32(saved)) == checksum:
            return np.load(io.BytesIO(saved), allow_pickle=False)
        aside = rename(path, path.with_suffix(_DAMAGED))
        warnings.warn(
            f"{path} is damaged: its content is not what was written; it is now "
            f"{aside.name}, and its samples are {self.contents.computed} again",
            stacklevel=6,
        )
        return None

    def mapped(self, number: int) -> np.ndarray:
        """Returns a part's numbers, mapped into memory; no checksum is computed."""
        return np.load(self._path(number), mmap_mode="r", allow_pickle=False)

    def is_whole(self, number: int) -> bool:
        """Returns whether a part is what was written, in the memory of a chunk."""
        path, crc = self._path(number), 0
        left = path.stat().st_size - _CHECKSUM_BYTES
        with path.open("rb") as file:
            while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
                crc = zlib.crc32(chunk, crc)
                left -= len(chunk)
            return self._checksum(number, crc) == file.read()

    def save(self, number: int, numbers: np.ndarray) -> None:
        """Keeps the numbers of a part, all or nothing, also when the power fails."""
        if self.folder is None:
            return
        path = self._path(number)

        def write(file: BinaryIO) -> Path:
            # As np.save does it, without its copy of the numbers.
            header, content = io.BytesIO(), np.ascontiguousarray(numbers)
            kind = np.lib.format.header_data_from_array_1_0(content)
            np.lib.format.write_array_header_1_0(header, kind)
            data, crc = memoryview(content.reshape(-1)).cast("B"), 0
            chunks = range(0, len(data), _CHUNK_BYTES)
            for chunk in (
                header.getbuffer(),
                *(data[start : start + _CHUNK_BYTES] for start in chunks),
            ):
                crc = zlib.crc32(chunk, crc)
                file.write(chunk)
            file.write(self._checksum(number, crc))
            return path

        _write(path, write, self.contents)

    def clear_unfinished(self) -> None:
        """Deletes what a killed run was writing; call it before any replica writes."""
        if self.folder is not None:
            for path in self.folder.glob(f"part-*{_UNFINISHED}"):
                path.unlink(missing_ok=True)

    def describe(self) -> None:
        """Writes what is computed, or checks that the folder is for the same."""
        if self.folder is None:
            return
        path = self.folder / DESCRIPTION
        if not path.exists():

            def write(file: BinaryIO) -> Path:
                file.write(self._text)
                return path

            _write(path, write, self.contents)
        # Read it also if it has just been written: maybe by another replica or job.
        saved = read_description(self.folder, self.contents, _ANOTHER)
        own = json.loads(self._text)
        found = differences(saved, own, {name: name for name in {**own, **saved}})
        if found:
            more = f"; and {len(found) - _FEW} more" if len(found) > _FEW else ""
            raise ValueError(
                f"{self.folder} holds {self.contents.what} of something else: "
                f"{'; '.join(found[:_FEW])}{more}. {_ANOTHER}"
            )

    @functools.cached_property
    def _text(self) -> bytes:
        own = {"format": FORMAT, "count": self.count, "part_size": self.size}
        return json.dumps({**own, **self.description}, indent=1).encode()

    def _checksum(self, number: int, crc: int) -> bytes:
        return hashlib.sha256(self._text + b"%d %d" % (number, crc)).digest()

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"part-{number:08d}.npy"


def read_description(folder: Path, contents: Contents, remedy: str) -> dict[str, Any]:
    """Returns what a folder says that its parts are.

    Raises:
        ValueError: It is damaged, of an earlier version, or has other numbers than
            ``contents`` names; the message ends with ``remedy``.
    """
    path = folder / DESCRIPTION
    try:
        saved = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}). {remedy}") from error
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        received = saved.get("format") if isinstance(saved, dict) else None
        raise ValueError(
            f"{folder} was written by another version of per_sample_grad: its format "
            f"is {received!r}, and this version reads format {FORMAT}, whose checksums "
            f"are others. {remedy}"
        )
    if contents.key not in saved:
        others = [c for c in (SCORED, INDEXED) if c.key in saved]
        found = f"{others[0].what} of {others[0].function}" if others else "other parts"
        raise ValueError(
            f"{folder} holds {found}, not the {contents.what} of {contents.function}. "
            f"{remedy}"
        )
    return saved


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


def _write(path: Path, write: Callable[[BinaryIO], Path], contents: Contents) -> None:
    # A unique name: replicas may be threads, or machines with the same process ids.
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}{_UNFINISHED}")
    try:
        write_whole(unfinished, write)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}. The parts that are finished are kept: call "
            f"{contents.function} again with the same folder as soon as it can be "
            "written",
            str(path),
        ) from error
