"""Counts of what a training step must not do: compile, and copy to the host."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator

import torch

from xla_replica.backends.local import default_device
from xla_replica.backends.replica import Replica


@dataclasses.dataclass
class Counts:
    """What the process did between two moments; filled in when `count` ends.

    All counts are those of the whole process, and so of all emulated replicas together.
    They are torch_xla's, and TorchTPU's compilations, and 0 elsewhere.

    Attributes:
        compilations: Graphs compiled.
        transfers: Device-to-host transfers, each of one or more tensors.
        fallbacks: Operations that fell back to the host, by name, with their number.
    """

    compilations: int = 0
    transfers: int = 0
    fallbacks: dict[str, int] = dataclasses.field(default_factory=dict)


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

    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    fallbacks = {name: int(metrics.counter_value(name)) for name in names}
    return Counts(samples("CompileTime"), samples("TransferFromDeviceTime"), fallbacks)


@contextlib.contextmanager
def count(replica: Replica | None = None) -> Iterator[Counts]:
    """Counts the compilations and device-to-host transfers of a block.

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
    yield counts
    barrier()
    after = snapshot()
    barrier()
    counts.compilations = after.compilations - before.compilations
    counts.transfers = after.transfers - before.transfers
    counts.fallbacks = dict(Counter(after.fallbacks) - Counter(before.fallbacks))
