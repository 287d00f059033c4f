"""Checkpoints as files: each is whole or not there, and damage is noticed.

In the folder of a `Checkpointer`, a file's name holds the number of updates and the
beginning of the SHA-256 of its content. A file with such a name is therefore complete,
one that has changed does not fit its name, and no index can be lost or contradict them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import os
import pickle
import re
import shutil
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from variable_batch_size.checkpoint import shards
from xla_replica.common.differences import check_same
from xla_replica.common.files import rename, sha256, write_whole
from xla_replica.common.trees import map_tensors, without_numpy

logger = logging.getLogger(__name__)

_DIGITS = 32  # of the SHA-256 in a name
_NAME = re.compile(rf"(update|best)-(\d{{8,}})-([0-9a-f]{{{_DIGITS}}})\.pt")
_UNFINISHED = ".unfinished"
_ABANDONED_SECONDS = 3600.0  # after so long without a write
_DAMAGED = "damaged-"


class CheckpointError(RuntimeError):
    """There are checkpoints, and none of them can be used."""


def write_checkpoint(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes a state in place of the earlier one; call it on replica 0 only.

    For a loop without an `ElasticOptimizer`; with one, see `Checkpointer`. A crash at
    any moment leaves the earlier file. Raises OSError if the file cannot be written.

    Args:
        path: The file; its folder is made if it is missing.
        state: Tensors on the CPU (see `xla_replica.Replica.to_host`) and plain values.
            Under ``"settings"``, by name, what a run must have in common with this one
            to resume it.
    """
    path = Path(path)
    unfinished = path.with_suffix(_UNFINISHED)
    state = without_numpy(state)
    write_whole(unfinished, lambda file: torch.save(state, file), path)


def read_checkpoint(
    path: str | Path, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns what `write_checkpoint` wrote, with all tensors on the CPU.

    Args:
        path: The file.
        settings: All settings of this run, to be compared with the saved
            ``"settings"``. Default: the state of any run is returned.

    Raises:
        ValueError: The settings differ; all differences are listed.
        CheckpointError: It is damaged, or holds more than tensors and plain values.
        OSError: The file cannot be read.
    """
    path = Path(path)
    try:
        _check_regular(path)
        state: dict[str, Any] = parse(path)
    except CheckpointError as damage:
        raise CheckpointError(f"{path} cannot be loaded: {damage}") from damage
    if settings is not None:
        check_same(state.get("settings", {}), settings, f"{path} is of another run")
    return state


# --- the folder of a Checkpointer -----------------------------------------------------


class SavedFile(NamedTuple):
    """A checkpoint in a folder: its file, updates, and the hash of its content."""

    path: Path
    num_updates: int
    digest: str

    def read(self) -> Any:
        """Returns the state in the file, on the CPU, in the file's own memory pages.

        The processes of a host share these, and none needs memory of its own. Copy
        what is to outlive the file (`own_tensors`): where another host deletes a file
        on a network, pages that have not been read are lost, and using them is fatal.

        Raises CheckpointError, which says how, if the file is damaged. Other errors,
        such as that of a server that does not answer, are not damage.
        """
        _check_regular(self.path)
        if sha256(self.path)[:_DIGITS] != self.digest:
            raise CheckpointError("its content is not what was written")
        return parse(self.path, mapped=True)


def saved_files(folder: Path, kind: str = "update") -> list[SavedFile]:
    """Returns the files of a kind, 'update' or 'best', the newest first, unread."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and match[1] == kind:
                found.append(SavedFile(path, int(match[2]), match[3]))
    return sorted(found, key=lambda f: (f.num_updates, _modified(f.path)), reverse=True)


def write(folder: Path, num_updates: int, state: Any) -> Path:
    """Writes a checkpoint and returns its file; a crash leaves the others intact.

    Raises OSError, with the path, if it cannot be written.
    """
    writer = f"{socket.gethostname()}-{os.getpid()}"  # a run may outlive its successor
    name = f"update-{num_updates:08d}"

    def content(file: BinaryIO) -> Path:
        hashed: Any = _Hashed(file)
        torch.save(state, hashed)
        return folder / f"{name}-{hashed.sha256.hexdigest()[:_DIGITS]}.pt"

    unfinished = folder / f"{name}-{writer}{_UNFINISHED}"
    try:
        return write_whole(unfinished, content)
    except RuntimeError as error:
        # Of a full disk torch says that a position in the file is unexpected.
        cause = error.__context__
        if not isinstance(cause, OSError):
            raise
        reason = cause.strerror or str(cause)
        raise OSError(cause.errno, reason, str(unfinished)) from error


def copy_as_best(path: Path) -> Path:
    """Makes a written checkpoint the best one, in place of the earlier best."""
    best = path.with_name(path.name.replace("update-", "best-", 1))
    unfinished = best.with_suffix(_UNFINISHED)

    unfinished.unlink(missing_ok=True)
    try:
        os.link(path, unfinished)
    except OSError:  # this file system has no hard links
        with path.open("rb") as source:
            copy = functools.partial(shutil.copyfileobj, source)
            write_whole(unfinished, copy, best)
    else:
        rename(unfinished, best)
    for other in saved_files(path.parent, "best"):
        if other.path != best and other.path.is_file():
            other.path.unlink(missing_ok=True)
    return best


def tidy(folder: Path, keep: int) -> None:
    """Deletes abandoned unfinished files, and all but the newest ``keep`` others."""
    for unfinished in folder.glob(f"*{_UNFINISHED}"):
        age = time.time() - _modified(unfinished) / 1e9
        if age > _ABANDONED_SECONDS and unfinished.is_file():
            unfinished.unlink(missing_ok=True)
    regular = [file for file in saved_files(folder) if file.path.is_file()]
    for old in regular[keep:]:
        old.path.unlink(missing_ok=True)
    left = [*saved_files(folder), *saved_files(folder, "best")]
    if left:
        shards.tidy(folder, [file.num_updates for file in left])


def newest_whole(folder: Path, kind: str = "update") -> tuple[SavedFile, Any] | None:
    """Returns the newest checkpoint that is not damaged, if any, and its state.

    Damaged ones are renamed, so that they no longer count. Raises CheckpointError if
    all are damaged, those of earlier calls included.
    """
    for file in saved_files(folder, kind):
        try:
            state = file.read()
            how = shards.damage(folder, state)
            if how is None:
                return file, state
        except FileNotFoundError:  # deleted meanwhile
            continue
        except CheckpointError as damage:
            how = str(damage)
        aside = file.path.with_name(f"{_DAMAGED}{file.path.name}")
        with contextlib.suppress(FileNotFoundError):
            rename(file.path, aside)
        logger.warning(
            f"checkpoint {file.path} is damaged: {how}; it is now {aside.name}, and "
            "the one before it is used"
        )
    num_damaged = len(list(folder.glob(f"{_DAMAGED}{kind}-*")))
    if num_damaged:
        raise CheckpointError(
            f"all {num_damaged} checkpoints in {folder} are damaged; they are called "
            f"{_DAMAGED}* now. Move them away to begin anew, or put a copy there"
        )
    return None


def own_tensors(state: Any) -> Any:
    """Returns a state of `SavedFile.read` with its tensors in memory of their own."""
    return map_tensors(state, torch.clone)


def is_plain(state: Any) -> bool:
    """Returns whether `parse` lets pass what a state holds beside its tensors."""
    buffer = io.BytesIO()
    torch.save(map_tensors(state, lambda tensor: None), buffer)
    buffer.seek(0)
    try:
        parse(buffer)
    except CheckpointError:
        return False
    return True


def parse(path: Path | BinaryIO, mapped: bool = False) -> Any:
    """Returns the state in a checkpoint, on the CPU: tensors and plain values only.

    Raises CheckpointError, which says why, if it cannot be loaded. It does not repeat
    torch's advice to load the file without this protection.

    Args:
        path: The file, or its content, which is not mapped.
        mapped: Leave tensors in the file's pages. Their bits are then not checked.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = named[1] if named else "something else"
        raise CheckpointError(
            "only tensors and plain values are loaded, and nothing is run, but it "
            f"holds {what}"
        ) from None
    except Exception as error:  # unpickling raises many kinds
        if mapped and "mmap" in str(error):  # this file system has no such pages
            return parse(path)
        if "allocate" in str(error):  # too little memory is not damage
            raise
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


def _check_regular(path: Path) -> None:
    """Raises CheckpointError unless a path is a file that can be read to its end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError("it is a folder, a pipe or a device, not a regular file")


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


def _modified(path: Path) -> int:
    """Returns when a file was last written, in nanoseconds; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
