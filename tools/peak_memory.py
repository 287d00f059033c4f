"""What memory a step needs, as torch's profiler counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def peak_memory(step: Callable[[], Any]) -> int:
    """Returns the most bytes by which torch's allocator grew during a step.

    Counted from its minimum: a step may begin by freeing the last one's gradients.
    """
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
    return most
