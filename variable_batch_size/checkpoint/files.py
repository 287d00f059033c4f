"""Checkpoints as files: each is whole or not there, and damage is noticed.

In the folder of a `Checkpointer`, a file's name holds the number of updates and the
beginning of the SHA-256 of its content. A file with such a name is therefore complete,
one that has changed does not fit its name, and no index can be lost or contradict them.
The name of one that was the best when it was written begins with ``best``.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from variable_batch_size.checkpoint import shards
from xla_replica import MemberLost
from xla_replica.common.differences import check_same
from xla_replica.common.files import UNFINISHED, sha256, unfinished_name, write_whole
from xla_replica.common.trees import without_numpy

logger = logging.getLogger(__name__)

_DIGITS = 32  # of the SHA-256 in a name
_NAME = re.compile(rf"(?:update|best)-(\d{{8,}})-([0-9a-f]{{{_DIGITS}}})\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or would not be."""


class NewerCheckpoints(CheckpointError, MemberLost):
    """A folder has checkpoints of more updates: of another run, or of other members."""


def write_checkpoint(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes a state in place of the earlier one; call it on replica 0 only.

    For a loop without an `ElasticOptimizer`; with one, see `Checkpointer`. A crash at
    any moment leaves the earlier file. Raises OSError if the file cannot be written,
    and CheckpointError if it could not be read again.

    Args:
        path: The file; its folder is made if it is missing.
        state: Tensors on the CPU (see `xla_replica.Replica.to_host`) and plain values.
            Under ``"settings"``, by name, what a run must have in common with this one
            to resume it.
    """
    path = Path(path)
    write_whole(path.with_suffix(UNFINISHED), partial(_save, state), path)


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
    state: dict[str, Any] = load(Path(path))
    if settings is not None:
        check_same(state.get("settings", {}), settings, f"{path} is of another run")
    return state


def load(path: Path, mapped: bool = False) -> Any:
    """Returns the state in a file, on the CPU: tensors and plain values only.

    Raises CheckpointError, which says why, if it cannot be loaded. It does not repeat
    torch's advice to load the file without this protection.

    Args:
        path: The file.
        mapped: Leave tensors in the file's memory pages. The processes of a host share
            these, and none needs memory of its own. Copy what is to outlive the file:
            where another host deletes it, pages that were not read are lost, and using
            them is fatal.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise CheckpointError(
            f"{path} holds {found[1] if found else 'something else'}, and may hold "
            "tensors, numbers, texts, lists and dicts; nothing of it is run"
        ) from None
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error


def _save(state: Any, file: BinaryIO) -> None:
    """Writes a state into a file, and raises CheckpointError unless it can be read."""
    try:
        torch.save(without_numpy(state), file)
    except RuntimeError as error:
        # Of a full disk torch says that a position in the file is unexpected.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    file.flush()
    load(Path(file.name), mapped=True)


# --- the folder of a Checkpointer -----------------------------------------------------


class SavedFile(NamedTuple):
    """A checkpoint in a folder, unread. They sort by updates, then by age.

    Attributes:
        num_updates: Updates that its run had made.
        written: When it was written, in nanoseconds.
        path: The file.
        digest: How the SHA-256 of its content begins.
    """

    num_updates: int
    written: int
    path: Path
    digest: str

    def is_whole(self) -> bool:
        """Returns whether it and its shards can be used; a warning says why not.

        Other errors, such as that of a server that does not answer, are not damage.
        """
        try:
            _check_digest(self.path, self.digest)
            state = load(self.path, mapped=True)
            for name, digest in state.get("digests", {}).items():
                _check_digest(self.path.parent / state["shards"] / name, digest)
        except CheckpointError as error:
            logger.warning(f"{self.path.name} is damaged, and not used: {error}")
            return False
        return True


def _check_digest(path: Path, digest: str) -> None:
    if not path.exists() or not sha256(path).startswith(digest):
        raise CheckpointError(f"{path} is missing or has changed")


def saved_files(folder: Path, best: bool = False) -> list[SavedFile]:
    """Returns the checkpoints in a folder, the newest first.

    Or, with ``best``, those alone that were the best when they were written.
    """
    found = []
    for path in folder.glob("best-*.pt" if best else "*.pt"):
        match = _NAME.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            if match and path.is_file():
                written = path.stat().st_mtime_ns
                found.append(SavedFile(int(match[1]), written, path, match[2]))
    return sorted(found, reverse=True)


def newest_whole(folder: Path, best: bool = False) -> Path | None:
    """Returns the newest checkpoint that is not damaged, or None.

    Raises CheckpointError if there are some and all are damaged.
    """
    files = saved_files(folder, best)
    newest = next((file.path for file in files if file.is_whole()), None)
    if files and newest is None:
        raise CheckpointError(
            f"all {len(files)} checkpoints in {folder} are damaged: move them away"
        )
    return newest


def claim(folder: Path, num_updates: int) -> None:
    """Prepares a folder for a run of so many updates, which is going to write there.

    Deletes damaged checkpoints of more updates, which loading has passed over. Raises
    NewerCheckpoints if one of them is whole, and OSError if the folder cannot be
    written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    for file in saved_files(folder):
        if file.num_updates <= num_updates:
            return
        if file.is_whole():
            raise NewerCheckpoints(
                f"{file.path} has {file.num_updates} updates, and this run "
                f"{num_updates}: call load() before training, or change the folder"
            )
        file.path.unlink(missing_ok=True)


def write(folder: Path, num_updates: int, state: Any, is_best: bool = False) -> Path:
    """Writes a checkpoint and returns its file; a crash leaves the others intact.

    Raises OSError, with the path, if it cannot be written.
    """
    # A run may outlive its successor, so that two write at once.
    unfinished = unfinished_name(folder / f"update-{num_updates:08d}-")

    def content(file: BinaryIO) -> Path:
        _save(state, file)
        digest, kind = sha256(unfinished)[:_DIGITS], "best" if is_best else "update"
        return folder / f"{kind}-{num_updates:08d}-{digest}.pt"

    return write_whole(unfinished, content)


def tidy(folder: Path, keep: int) -> None:
    """Deletes all but the newest checkpoints and the best, and what was abandoned.

    That is of fewer updates than a checkpoint; of more, it is being written.
    """
    files, best = saved_files(folder), saved_files(folder, best=True)[:1]
    kept = {*files[:keep], *best}
    for file in files:
        if file not in kept:
            file.path.unlink(missing_ok=True)
    numbers = {file.num_updates for file in kept}
    parts = folder.glob(f"update-*{shards.SUFFIX}")
    for path in [*folder.glob(f"update-*{UNFINISHED}"), *parts]:
        number = int(path.name.split("-")[1])
        if number < max(numbers) and number not in numbers:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
