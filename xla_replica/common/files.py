"""Files that exist completely or not at all, even after a power failure."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 2**22


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_whole(unfinished: Path, write: Callable[[BinaryIO], Path]) -> Path:
    """Writes a file that gets its name once it is complete and on the disk.

    Until then it is called ``unfinished``, in the same folder, which is created if it
    is missing. A crash at any moment leaves the earlier file of that name; if writing
    fails, nothing is left. ``write`` returns the final name, which may depend on the
    content, and so does this.
    """
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("wb") as file:
            path = write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return rename(unfinished, path)


def rename(path: Path, new: Path) -> Path:
    """Renames a file so that the new name survives a power failure, and returns it."""
    path.replace(new)
    sync_folder(new.parent)
    return new


def sync_folder(folder: Path) -> None:
    """Makes a renaming in this folder durable, on systems that support it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
