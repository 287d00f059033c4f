"""What the sampler's arguments mean."""

from __future__ import annotations

import torch

import xla_replica
from xla_replica import LocalReplica, Replica


def replica_for(num_replicas: int | None, rank: int | None) -> Replica:
    """The replica that balances: the caller's, or one of its own.

    Raises:
        ValueError: The arguments name replicas that cannot sum with one another.
    """
    current = xla_replica.current()
    if (num_replicas, rank) in ((1, None), (1, 0)) and current.num_replicas > 1:
        return LocalReplica(current.device, "num_replicas=1 was asked for")
    asked = (
        current.num_replicas if num_replicas is None else num_replicas,
        current.rank if rank is None else rank,
    )
    if asked != (current.num_replicas, current.rank):
        raise ValueError(
            f"num_replicas={num_replicas}, rank={rank}, but the caller is {current}, "
            "and the balance is summed over replicas: leave both out, or pass "
            "num_replicas=1 for a sampler of its own"
        )
    return current


def generator_for(generator: torch.Generator | None, seed: int) -> torch.Generator:
    """The generator given, or a new one with ``seed``.

    Raises:
        TypeError, ValueError: It is no CPU generator, or the seed no integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    if generator is None:
        return torch.Generator().manual_seed(seed)
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
    if generator.device.type != "cpu":
        raise ValueError(
            f"generator is on {generator.device}; orders are drawn on the CPU, pass "
            "torch.Generator()"
        )
    return generator
