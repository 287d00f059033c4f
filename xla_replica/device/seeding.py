"""Seeding the process's CPU generator for a while."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class _Turn:
    """Whose turn it is to seed: the CPU generator belongs to the whole process."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.lock = threading.RLock()


_turn = _Turn()
# A loader worker may be forked while another emulated replica is inside the lock,
# and would find it locked for ever.
os.register_at_fork(after_in_child=_turn.renew)


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which draws on the CPU, outside every other thread's `seeded`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _turn.lock:
            return function(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers that torch draws on the CPU inside depend on ``seed`` alone.

    The CPU generator is put back afterwards. Emulated replicas are threads that share
    one, so they enter one at a time; in a loader's worker it is the worker's own.

    Args:
        seed: Of 64 bits, of which torch's CPU generator uses the lower 32.
    """
    with _turn.lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
