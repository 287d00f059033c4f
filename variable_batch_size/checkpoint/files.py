"""Checkpoints as files: each is whole or not there, and damage is noticed.

In the folder of a `Checkpointer`, a file's name holds the number of updates and the
beginning of the SHA-256 of its content. A file with such a name is therefore complete,
one that has changed does not fit its name, and no index can be lost or contradict them.
"""

from __future__ import annotations

import io
import logging
import pickle
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from variable_batch_size.checkpoint import shards
from xla_replica.common.differences import check_same
from xla_replica.common.files import sha256, write_whole
from xla_replica.common.trees import map_tensors, named_tensors, without_numpy

logger = logging.getLogger(__name__)

_DIGITS = 32  # of the SHA-256 in a name
_NAME = re.compile(rf"(update|best)-(\d{{8,}})-([0-9a-f]{{{_DIGITS}}})\.pt")
_UNFINISHED = ".unfinished"
_ABANDONED_SECONDS = 3600.0  # after so long without a write


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
    write = partial(torch.save, without_numpy(state))
    write_whole(path.with_suffix(_UNFINISHED), write, path)


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
    try:
        _check_regular(Path(path))
        state: dict[str, Any] = parse(Path(path))
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
        what is to outlive the file: where another host deletes a file on a network,
        pages that have not been read are lost, and using them is fatal.

        Raises CheckpointError, which says how, if the file is damaged. Other errors,
        such as that of a server that does not answer, are not damage.
        """
        _check_regular(self.path)
        if sha256(self.path)[:_DIGITS] != self.digest:
            raise CheckpointError("its content is not what was written")
        return parse(self.path, mapped=True)

    def read_whole(self) -> Any:
        """Returns the state; raises CheckpointError if its shards are damaged, too."""
        state = self.read()
        parts = state.get("shards", {"sha256": {}})
        for name, digest in parts["sha256"].items():
            path = self.path.parent / parts["folder"] / name
            if not path.exists() or sha256(path) != digest:
                raise CheckpointError(f"{path} is missing or has changed")
        return state


def saved_file(path: Path) -> SavedFile | None:
    """Returns the checkpoint that a path names, unread; None if it names none."""
    match = _NAME.fullmatch(path.name)
    return SavedFile(path, int(match[2]), match[3]) if match else None


def saved_files(folder: Path, kind: str = "update") -> list[SavedFile]:
    """Returns the files of a kind, 'update' or 'best', the newest first, unread."""
    paths = [*folder.iterdir()] if folder.exists() else []
    named = [path for path in paths if path.name.startswith(f"{kind}-")]
    found = [file for path in named if (file := saved_file(path))]
    return sorted(found, key=lambda f: (f.num_updates, _modified(f.path)), reverse=True)


def newest_whole(folder: Path, kind: str = "update") -> tuple[SavedFile, Any] | None:
    """Returns the newest checkpoint that is not damaged, if any, and its state.

    Raises CheckpointError if there are some and all are damaged.
    """
    num_damaged = 0
    for file in saved_files(folder, kind):
        try:
            return file, file.read_whole()
        except FileNotFoundError:  # deleted meanwhile
            continue
        except CheckpointError as damage:
            num_damaged += 1
            logger.warning(
                f"checkpoint {file.path} is damaged: {damage}; the one before it is "
                "used"
            )
    if num_damaged:
        raise CheckpointError(
            f"all {num_damaged} checkpoints in {folder} are damaged: move them away"
        )
    return None


def write(folder: Path, num_updates: int, state: Any) -> Path:
    """Writes a checkpoint and returns its file; a crash leaves the others intact.

    Raises OSError, with the path, if it cannot be written.
    """
    name = f"update-{num_updates:08d}"

    # A run may outlive its successor.
    unfinished = folder / f"{name}-{secrets.token_hex(4)}{_UNFINISHED}"

    def content(file: BinaryIO) -> Path:
        torch.save(state, file)
        file.flush()
        return folder / f"{name}-{sha256(unfinished)[:_DIGITS]}.pt"

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
    with path.open("rb") as source:
        copy = partial(shutil.copyfileobj, source)
        write_whole(best.with_suffix(_UNFINISHED), copy, best)
    _delete(file for file in saved_files(path.parent, "best") if file.path != best)
    return best


def tidy(folder: Path, keep: int, damaged: Iterable[SavedFile] = ()) -> None:
    """Deletes abandoned unfinished files, damaged ones, and the oldest ones.

    The newest ``keep`` are left.
    """
    for unfinished in folder.glob(f"*{_UNFINISHED}"):
        age = time.time() - _modified(unfinished) / 1e9
        if age > _ABANDONED_SECONDS and unfinished.is_file():
            unfinished.unlink(missing_ok=True)
    _delete(damaged)
    _delete([file for file in saved_files(folder) if file.path.is_file()][keep:])
    left = [*saved_files(folder), *saved_files(folder, "best")]
    if left:
        shards.tidy(folder, [file.num_updates for file in left])


def _delete(files: Iterable[SavedFile]) -> None:
    for file in files:
        if file.path.is_file():  # not a folder or a pipe of that name
            file.path.unlink(missing_ok=True)


def check_tensors(what: str, state: Any) -> None:
    """Raises TypeError if a state holds itself, or a tensor without content."""
    try:
        hollow = [name for name, tensor in named_tensors(state) if tensor.is_meta]
    except RecursionError:
        raise TypeError(
            f"{what} contains itself: save what it refers to by a name or a number"
        ) from None
    if hollow:
        raise TypeError(
            f"{what} has tensors on the device 'meta', such as {hollow[0]!r}, which "
            "have no content: give them some with to_empty() or load_state_dict(), or "
            "leave them out"
        )


def check_loadable(what: str, state: Any) -> None:
    """Raises TypeError if a state has values that `parse` would not let pass."""
    buffer, usual = io.BytesIO(), (torch.Tensor, torch.nn.Parameter)
    plain = map_tensors(state, lambda t: None if type(t) in usual else t)
    try:
        torch.save(plain, buffer)
        buffer.seek(0)
        parse(buffer)
    except (CheckpointError, pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{what} has values that torch.load(weights_only=True) refuses; states may "
            f"hold tensors, numbers, texts, lists and dicts: {error}"
        ) from error


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
            f"nothing is run, but it holds {what}; only plain values are loaded"
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


def _modified(path: Path) -> int:
    """Returns when a file was last written, in nanoseconds; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
