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


class Recording:
    """Records what the calling thread asks of torch, until `stop`."""

    def __init__(self) -> None:
        gc.collect()
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._found = torch.profiler.profile(activities=activities, profile_memory=True)
        self._found.start()

    def stop(self, device: str = "cpu") -> Profiled:
        """Returns what was asked, and of the memory of a kind of device."""
        self._found.stop()
        events = self._found.profiler.kineto_results.events()
        changes = [
            (e.start_ns(), e.nbytes())
            for e in events
            if e.name() == "[memory]" and e.device_type().name.lower() == device
        ]
        held = least = most = 0
        for _, change in sorted(changes, key=lambda pair: pair[0]):
            held += change
            least = min(least, held)
            most = max(most, held - least)
        return Profiled(sum(e.name().startswith("aten::") for e in events), most)


def profiled(step: Callable[[], Any], device: str = "cpu") -> Profiled:
    """Returns what a step asks of torch, and of the memory of a kind of device."""
    recording = Recording()
    result = step()
    del result
    return recording.stop(device)


def peak_memory(step: Callable[[], Any], device: str = "cpu") -> int:
    """Returns the most bytes by which torch's allocator grew during a step."""
    return profiled(step, device).peak_bytes
