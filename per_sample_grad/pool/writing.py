"""Files of parts, written piece by piece beside the computation.

A piece is checked and written while a CPU's cache has it, and neither the numbers of a
whole part nor a copy of a piece need be in memory.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from xla_replica.common.files import UnfinishedFile, unfinished_name

# A CPU's cache has room for so much of what was just computed.
PIECE_BYTES = 2**20
# What a file has besides the numbers: the header of NumPy, and the checksum.
_AROUND_BYTES = 128 + 32


def write_header(file: BinaryIO | PartFile, shape: Sequence[int]) -> None:
    """Begins a file of NumPy with float32 numbers of this shape."""
    header = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)),
        "fortran_order": False,
        "shape": tuple(shape),
    }
    np.lib.format.write_array_header_1_0(file, header)


class PartFile:
    """The file of a part, which appears when all of its numbers are on the disk.

    Args:
        path: Where it appears.
        shape: That of all numbers.
        checksum: Returns the end of the file for the CRC-32 of what is before it.
        function: What is to be called again when the disk is full.
    """

    def __init__(
        self,
        path: Path,
        shape: Sequence[int],
        checksum: Callable[[int], bytes],
        function: str,
    ) -> None:
        self._path, self._shape, self._function = path, shape, function
        self._checksum, self._crc = checksum, 0
        self._whole: UnfinishedFile | None = None

    def open(self) -> None:
        """Begins the file, under a name of its own."""
        with explained(self._path, self._function):
            self._whole = UnfinishedFile(unfinished_name(self._path))
            self._whole.reserve(4 * math.prod(self._shape) + _AROUND_BYTES)
            write_header(self, self._shape)

    def write(self, data: bytes | memoryview) -> None:
        """Adds bytes, as a file does."""
        assert self._whole is not None
        self._crc = zlib.crc32(data, self._crc)
        self._whole.file.write(data)

    def add(self, numbers: np.ndarray) -> None:
        """Adds the next samples' numbers, float32."""
        content = np.ascontiguousarray(numbers).reshape(-1)
        with explained(self._path, self._function):
            self.write(memoryview(content).cast("B"))

    def finish(self) -> None:
        """Lets the file appear, once it is on the disk."""
        assert self._whole is not None
        try:
            with explained(self._path, self._function):
                self._whole.file.write(self._checksum(self._crc))
                self._whole.finish(self._path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Deletes what was written, unless it has appeared."""
        if self._whole is not None:
            self._whole.discard()


class Writer:
    """Writes parts in threads, while the next pieces are computed.

    In its block call `begin` for a part, `add` for each of its pieces, and `finish`. A
    piece must stay as it is until the next one was added. A part may still be on its
    way to the disk while the next one is written, and all are there after the block. If
    that fails, an OSError is raised by one of the later calls.
    """

    def __init__(self) -> None:
        self._file: PartFile | None = None
        self._adding: Future[None] | None = None
        self._finishing: Future[None] | None = None
        self._adder, self._finisher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def __enter__(self) -> Writer:
        return self

    def begin(self, file: PartFile) -> None:
        """Writes this file from now on."""
        self._file = file
        self._adding = self._adder.submit(file.open)

    def add(self, numbers: np.ndarray) -> None:
        """Adds a piece to the part, as soon as the one before it was added."""
        assert self._file is not None
        _wait(self._adding)
        self._adding = self._adder.submit(self._file.add, numbers)

    def finish(self) -> None:
        """Lets the part appear, as soon as the one before it has."""
        assert self._file is not None
        _wait(self._adding)
        _wait(self._finishing)
        self._finishing = self._finisher.submit(self._file.finish)
        self._file = self._adding = None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._adder, self._finisher:
            pass
        if self._file is not None:
            self._file.discard()
        if kind is None:
            _wait(self._finishing)


def _wait(work: Future[None] | None) -> None:
    if work is not None:
        work.result()


@contextlib.contextmanager
def explained(path: Path, function: str) -> Iterator[None]:
    """Lets an OSError of the block say which file it is about, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}. The parts that are finished are kept: call "
            f"{function} again with the same folder as soon as it can be "
            "written",
            str(path),
        ) from error
