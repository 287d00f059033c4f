"""Files that exist completely or not at all, even after a power failure."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

# Ends the names of `unfinished_name`.
UNFINISHED = ".tmp"
_CHUNK_BYTES = 2**22


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def unfinished_name(path: Path) -> Path:
    """Returns a name beside a file's that nobody else has, for what is being written.

    Replicas may be threads, or machines with the same process ids.
    """
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}{UNFINISHED}")


def write_whole(
    unfinished: Path, write: Callable[[BinaryIO], Any], path: Path | None = None
) -> Path:
    """Writes a file that gets its name once it is complete and on the disk.

    Until then it is called ``unfinished``, in the same folder, which is made if it is
    missing. A crash at any moment leaves the earlier file of the final name; if writing
    fails, nothing else is left, and an OSError that names no file names this one.

    Returns:
        The final name: ``path``, or without it what ``write`` returns, which may depend
        on the content.
    """
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("wb") as file:
            name = write(file)
            file.flush()
            os.fsync(file.fileno())
        return rename(unfinished, path or name)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(unfinished)  # as of a disk that is full
        unfinished.unlink(missing_ok=True)
        raise


def rename(path: Path, new: Path) -> Path:
    """Renames a file so that the new name survives a power failure, and returns it."""
    path.replace(new)
    with contextlib.suppress(OSError):  # where a folder cannot be synchronised
        descriptor = os.open(new.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return new
