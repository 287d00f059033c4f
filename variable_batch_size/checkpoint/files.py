"""A folder of checkpoints: whole or not there, and damaged ones are found.

The name of a file holds the number of updates and the beginning of the SHA-256 of its
content. So a file that counts has been written completely, one that has changed since
does not fit its name, and nothing beside it can be lost or get out of step.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from xla_replica.common.files import rename, sync_folder, write_whole

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(update|best)-(\d{8,})-([0-9a-f]{32})\.pt")
UNFINISHED = ".unfinished"
_ABANDONED_SECONDS = 3600.0  # what has not been written to for so long
_DAMAGED = "damaged-"


class CheckpointError(RuntimeError):
    """There are checkpoints and none of them can be used."""


class SavedFile(NamedTuple):
    """A checkpoint in a folder.

    Attributes:
        path: Where it is; ``torch.load`` reads it.
        num_updates: Updates of the run until then.
        digest: What its content must hash to.
    """

    path: Path
    num_updates: int
    digest: str

    def content(self) -> bytes | None:
        """Its bytes; None if they are not those that were written, or it is gone.

        Raises:
            OSError: It is there and cannot be read now, which says nothing about it.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return content if _short(hashlib.sha256(content)) == self.digest else None


def saved_files(folder: Path, kind: str = "update") -> list[SavedFile]:
    """The files of a kind, 'update' or 'best', the newest first; contents unseen."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and match[1] == kind:
                found.append(SavedFile(path, int(match[2]), match[3]))
    return sorted(found, key=lambda f: (f.num_updates, _age(f.path)), reverse=True)


def write(folder: Path, num_updates: int, state: Any, kind: str = "update") -> Path:
    """Writes a checkpoint; a crash at any moment leaves the others as they were.

    The file is complete and on the disk before it gets its name.
    """
    writer = f"{socket.gethostname()}-{os.getpid()}"  # a run may outlive its successor
    name = f"{kind}-{num_updates:08d}"

    def content(file: BinaryIO) -> Path:
        hashed = _Hashed(file)
        torch.save(state, hashed)
        return folder / f"{name}-{_short(hashed.sha256)}.pt"

    return write_whole(folder / f"{name}-{writer}{UNFINISHED}", content)


def copy_as_best(path: Path) -> Path:
    """Makes a written checkpoint the best one, in place of the one before."""
    best = path.with_name(path.name.replace("update-", "best-", 1))
    unfinished = best.with_suffix(UNFINISHED)

    def content(file: BinaryIO) -> Path:
        file.write(path.read_bytes())
        return best

    unfinished.unlink(missing_ok=True)
    try:
        os.link(path, unfinished)
    except OSError:  # no hard links on this file system
        write_whole(unfinished, content)
    else:
        rename(unfinished, best)
    for other in saved_files(path.parent, "best"):
        if other.path != best:
            other.path.unlink(missing_ok=True)
    return best


def tidy(folder: Path, keep: int) -> None:
    """Deletes what somebody never finished and all but the newest ``keep``."""
    for unfinished in folder.glob(f"*{UNFINISHED}"):
        if time.time() - _age(unfinished) / 1e9 > _ABANDONED_SECONDS:
            unfinished.unlink(missing_ok=True)
    for old in saved_files(folder)[keep:]:
        old.path.unlink(missing_ok=True)


def set_aside(damaged: SavedFile) -> Path:
    """Renames a damaged checkpoint, so that it no longer counts."""
    aside = damaged.path.with_name(f"{_DAMAGED}{damaged.path.name}")
    with contextlib.suppress(FileNotFoundError):
        damaged.path.replace(aside)
    sync_folder(aside.parent)
    return aside


def newest_whole(folder: Path, kind: str = "update") -> tuple[SavedFile, bytes] | None:
    """The newest checkpoint whose content is what was written, and its content.

    Damaged ones are set aside with a warning.

    Raises:
        CheckpointError: There are only damaged ones, also from before.
        OSError: One cannot be read now.
    """
    for file in saved_files(folder, kind):
        content = file.content()
        if content is not None:
            return file, content
        logger.warning(
            "checkpoint %s is damaged: its content is not what was written; it is now "
            "%s, and the one before it is used",
            file.path,
            set_aside(file).name,
        )
    num_damaged = len(list(folder.glob(f"{_DAMAGED}{kind}-*")))
    if num_damaged:
        raise CheckpointError(
            f"all {num_damaged} checkpoints in {folder} are damaged; they are called "
            f"{_DAMAGED}* now. Move them away to begin anew, or put a copy there"
        )
    return None


def parse(content: bytes) -> Any:
    """The state in a checkpoint, on the CPU; only tensors and plain values."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _short(sha256: Any) -> str:
    return sha256.hexdigest()[:32]


def _age(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
