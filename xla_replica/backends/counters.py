"""Counts of what a training step must not do: compile, copy to the host, and wait."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

import torch

from xla_replica.backends.local import default_device
from xla_replica.backends.replica import Replica


@dataclasses.dataclass
class Counts:
    """What the process did between two moments; filled in when `count` ends.

    All counts are those of the whole process, and so of all emulated replicas together.
    The first three are torch_xla's, and 0 elsewhere; the last is a GPU's.

    Attributes:
        compilations: Graphs compiled.
        transfers: Device-to-host transfers, each of one or more tensors.
        fallbacks: Operations that fell back to the host, by name, with their number.
        waits: Operations that made the host wait for a GPU: reading a value, and
            copying to or from memory that is not pinned.
    """

    compilations: int = 0
    transfers: int = 0
    fallbacks: dict[str, int] = dataclasses.field(default_factory=dict)
    waits: int = 0


def snapshot() -> Counts:
    """Returns the counts since the process started."""
    if "torch_tpu" in sys.modules and default_device().type == "tpu":
        return Counts(torch.tpu._get_cache_stats().num_compilations)
    if "torch_xla" not in sys.modules:
        return Counts()
    import torch_xla.debug.metrics as metrics

    def samples(name: str) -> int:
        data = metrics.metric_data(name)  # None before the first sample
        return int(data[0]) if data else 0

    fallbacks = {
        name: int(metrics.counter_value(name))
        for name in metrics.counter_names()
        if name.startswith("aten::")
    }
    return Counts(samples("CompileTime"), samples("TransferFromDeviceTime"), fallbacks)


# What torch warns of in its debug mode, once for each; and of that mode, once.
_WAIT = "called a synchronizing CUDA operation"
_OF_MODE = "Synchronization debug mode is a prototype"


@contextlib.contextmanager
def _counting_waits(counts: Counts) -> Iterator[None]:
    """Counts operations that wait for a GPU, where the process uses one."""
    if not torch.cuda.is_initialized():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if _WAIT in str(each.message):
            counts.waits += 1
        elif _OF_MODE not in str(each.message):
            warnings.warn_explicit(
                each.message, each.category, each.filename, each.lineno
            )


@contextlib.contextmanager
def count(replica: Replica | None = None) -> Iterator[Counts]:
    """Counts the compilations, device-to-host transfers and waits of a block.

    Args:
        replica: The calling replica. Needed, on every replica, where replicas share a
            process: barriers then keep what peers do before and after the block out of
            the counts.

    >>> with count() as counts:
    ...     pass  # training steps
    >>> counts.compilations, counts.transfers
    (0, 0)
    """
    barrier = replica.barrier if replica is not None else lambda: None
    counts = Counts()
    barrier()  # no replica is still in what came before
    before = snapshot()
    barrier()  # no replica begins before all have read the counts
    with _counting_waits(counts):
        yield counts
    barrier()
    after = snapshot()
    barrier()
    counts.compilations = after.compilations - before.compilations
    counts.transfers = after.transfers - before.transfers
    counts.fallbacks = dict(Counter(after.fallbacks) - Counter(before.fallbacks))
