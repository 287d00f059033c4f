"""Seeding the process's CPU generator for the length of a block."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from xla_replica.common.arguments import check_integer
from xla_replica.device.device_traits import traits

# All threads of the process share the CPU generator.
_turn: Any = threading.RLock()
# A loader worker may be forked while another emulated replica holds the lock, and
# would then wait for it for ever.
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_turn._at_fork_reinit)


class _Own(threading.local):
    """The calling thread's generator, and whether its state is in place now."""

    generator: torch.Generator | None = None
    in_place = False


_own = _Own()


def draw_from(generator: torch.Generator | None) -> None:
    """Makes `own_draws` in the calling thread draw from ``generator``.

    It has the state that the CPU generator would have if the replica were a process.
    """
    _own.generator = generator


@contextlib.contextmanager
def own_draws() -> Iterator[None]:
    """Makes what torch draws on the CPU inside the block the calling thread's own.

    No other thread enters such a block meanwhile. In a thread without a generator of
    its own they are the process's.
    """
    own = _own.generator
    with _turn:
        if own is None or _own.in_place:
            yield
            return
        shared = torch.default_generator.get_state()
        torch.default_generator.set_state(own.get_state())
        _own.in_place = True
        try:
            yield
        finally:
            _own.in_place = False
            own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(shared)


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` such that all of it runs inside `own_draws`.

    For functions that draw from the CPU generator, or set or read its state.
    """
    return own_draws()(function)


def check_seed(seed: int) -> int:
    """Returns ``seed`` as an int; raises unless torch's generators take it."""
    return check_integer("seed", seed, -(2**63), 2**64 - 1)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Makes what torch draws on the CPU inside the block depend on ``seed`` alone.

    The state of the CPU generator is restored afterwards. Emulated replicas are threads
    that take turns at one generator, so they enter one at a time; a loader's worker has
    its own.

    Args:
        seed: An integer of 64 bits; torch's CPU generator uses the lower 32.

    Raises:
        TypeError, ValueError: ``seed`` is not an integer of 64 bits.
    """
    number = check_seed(seed)
    with own_draws(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(number)
        yield


def generator_of(device: torch.device) -> torch.Generator:
    """Returns the generator of what is drawn on a device, without torch_xla's.

    Not by the module's ``get_rng_state``, which TorchTPU keeps to torch itself.
    """
    if traits(device).is_host:
        return torch.default_generator
    torch.empty(0, device=device)  # a GPU has none before it is first used
    index = device.index
    if index is None:
        index = torch.accelerator.current_device_index()
    found = torch.get_device_module(device).default_generators
    generators: Sequence[torch.Generator] = found
    return generators[index]
