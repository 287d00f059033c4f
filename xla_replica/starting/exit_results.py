"""What a replica in another process returned or raised, and its way back."""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from xla_replica.errors import ReplicaError, Stopped


class Ending(NamedTuple):
    """How a replica ended that ended well: by returning, or by `Stopped`."""

    value: Any
    stopped: Stopped | None


def run_to_end(fn: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> Ending:
    """Calls ``fn(rank, *args)``."""
    try:
        return Ending(fn(rank, *args), None)
    except Stopped as stopped:
        return Ending(None, stopped)


def values(endings: Iterable[Ending]) -> list[Any]:
    """What the replicas returned.

    Raises:
        Stopped: At least one of them did.
    """
    endings = list(endings)
    for ending in endings:
        if ending.stopped is not None:
            raise ending.stopped
    return [ending.value for ending in endings]


class _Pickler(pickle.Pickler):
    """Writes tensors of any device, also inside modules, as tensors on the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type != "cpu":
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def dump(value: Any) -> bytes:
    """``value`` as bytes; nothing of this process is needed to `load` them."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """What `dump` wrote: bytes of our own parent or replica, so any value is meant."""
    return pickle.loads(data)


def dump_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """``(fn, args)`` for another process.

    Raises:
        TypeError: It cannot be pickled.
    """
    try:
        return dump((fn, args))
    except Exception as error:  # pickle raises many kinds
        raise TypeError(
            f"launch: {fn!r} and its arguments must be picklable, because replicas "
            "run in another process: pass a function defined at the top level of a "
            f"module ({error})"
        ) from error


def dump_failure(rank: int | None, error: BaseException) -> bytes:
    """A failure for `raise_failure`; the exception goes along if it can travel."""
    who = "the emulated replicas" if rank is None else f"replica {rank}"
    trace = "".join(traceback.format_exception(error))
    text = f"{who} raised {type(error).__name__}: {error}\n\n{trace}"
    with contextlib.suppress(Exception):  # pickle raises many kinds
        data = dump((rank, text, error))
        load(data)
        return data
    return dump((rank, text, None))


def raise_failure(data: bytes) -> None:
    """Raises what `dump_failure` wrote as a ReplicaError."""
    rank, text, error = load(data)
    if isinstance(error, ReplicaError):
        raise error
    raise ReplicaError(text, rank) from error


def write_ending(folder: str, rank: int, ending: Ending) -> None:
    """Writes how replica ``rank`` ended into a folder."""
    Path(folder, f"{rank:06d}.ending").write_bytes(dump(ending))


def read_endings(folder: str) -> list[Ending]:
    """How the replicas ended, by rank."""
    return [load(p.read_bytes()) for p in sorted(Path(folder).glob("*.ending"))]
