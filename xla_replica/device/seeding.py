"""Seeding the process's CPU generator for the length of a block."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xla_replica.common.arguments import check_integer


class _Turn:
    """A lock for the CPU generator, which all threads of the process share."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.lock = threading.RLock()


_turn = _Turn()
# A loader worker may be forked while another emulated replica holds the lock, and
# would then wait for it for ever.
os.register_at_fork(after_in_child=_turn.renew)


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` such that it never runs during another thread's `seeded`.

    For functions that draw from the CPU generator.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _turn.lock:
            return function(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Makes what torch draws on the CPU inside the block depend on ``seed`` alone.

    The state of the CPU generator is restored afterwards. Emulated replicas are threads
    that share one generator, so they enter one at a time; a loader's worker has its
    own.

    Args:
        seed: An integer of 64 bits; torch's CPU generator uses the lower 32.

    Raises:
        TypeError: ``seed`` is not an integer.
    """
    number = check_integer("seed", seed)
    with _turn.lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(number)
        yield
