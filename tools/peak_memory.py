"""What a step asks of torch, as its profiler counts it: operations and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Profiled(NamedTuple):
    """What a step asks of torch.

    Attributes:
        operations: How many operations ran, those within others too.
        peak_bytes: The most bytes by which torch's allocator grew, from its minimum: a
            step may begin by freeing the last one's gradients.
    """

    operations: int
    peak_bytes: int


def profiled(step: Callable[[], Any]) -> Profiled:
    """Returns what a step asks of torch."""
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as found:
        result = step()
    del result
    events = found.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = least = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        least = min(least, held)
        most = max(most, held - least)
    return Profiled(sum(e.name().startswith("aten::") for e in events), most)


def peak_memory(step: Callable[[], Any]) -> int:
    """Returns the most bytes by which torch's allocator grew during a step."""
    return profiled(step).peak_bytes
