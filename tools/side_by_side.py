"""Timing steps beside a plain one, on a machine that does other things as well."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from tqdm import tqdm

Step = Callable[[], object]


class SideBySide(NamedTuple):
    """What `side_by_side` has measured: medians over rounds.

    Attributes:
        ratios: The processor time of each step over that of the plain one, by name.
        plain_seconds: The processor time of the plain step.
        rounds: The ratios of every round.
    """

    ratios: dict[str, float]
    plain_seconds: float
    rounds: dict[str, list[float]]


def keep_freed_pages() -> bool:
    """Tells glibc to keep freed memory for itself; returns whether there is glibc.

    It is what MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ do in the environment.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    return mallopt is not None and all(
        [mallopt(trim_threshold, 2**31 - 1), mallopt(mmap_threshold, 2**30)]
    )


def side_by_side(
    plain: Step,
    steps: Mapping[str, Step],
    rounds: int,
    title: str | None = None,
    *,
    warm_up: int = 2,
    disable: bool | None = None,
    device: str = "cpu",
) -> SideBySide:
    """Returns the processor times of steps over that of a plain one.

    Each is timed between two plain ones, and half of the rounds in the other sequence:
    what else the machine does, and what one step leaves to the next, is in both.

    Args:
        plain: What ordinary training does.
        steps: What is compared with it, by name.
        rounds: How often each is timed.
        title: What the progress bar is called.
        warm_up: How many rounds before these are not counted.
        disable: Whether there is no progress bar; None: there is one on a terminal.
        device: Where the steps compute. On an accelerator the clock runs until it is
            idle, and so in place of processor time.
    """
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    seconds = []
    clock = _processor_seconds if device == "cpu" else _seconds_until_idle
    for turn in tqdm(range(-warm_up, rounds), title, disable=disable):
        before = clock(plain)
        for name in steps if turn % 2 else reversed(steps):
            own, after = clock(steps[name]), clock(plain)
            if turn >= 0:
                ratios[name].append(2 * own / (before + after))
                seconds.append(after)
            before = after
    medians = {name: statistics.median(each) for name, each in ratios.items()}
    return SideBySide(medians, statistics.median(seconds), ratios)


def _processor_seconds(step: Step) -> float:
    """Returns the processor time of one step."""
    began = time.process_time()
    step()
    return time.process_time() - began


def _seconds_until_idle(step: Step) -> float:
    """Returns the seconds of one step, until the accelerator has done all of it."""
    torch.accelerator.synchronize()
    began = time.perf_counter()
    step()
    torch.accelerator.synchronize()
    return time.perf_counter() - began
