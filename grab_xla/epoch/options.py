"""What the sampler's arguments mean."""

from __future__ import annotations

import zlib

import numpy as np
import torch

import xla_replica
from xla_replica import LocalReplica, Replica


def replica_for(
    num_replicas: int | None, rank: int | None, device: torch.device | str | None
) -> Replica:
    """The replica that balances: the caller's, or one of its own.

    Raises:
        ValueError: The arguments name replicas that cannot sum with one another, or a
            device that is not theirs.
    """
    current = xla_replica.current()
    if device is not None and torch.device(device).type != current.device.type:
        if num_replicas != 1 and current.num_replicas > 1:
            raise ValueError(
                f"device={device}, but the caller is {current}, whose sums are there: "
                "leave device out, or pass num_replicas=1 for a sampler of its own"
            )
        return LocalReplica(device, "a device was asked for")
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
    # A copy: replicas that are threads may have been given the same object.
    own = torch.Generator()
    own.set_state(generator.get_state())
    return own


def check_same_order(order: np.ndarray, replica: Replica) -> None:
    """Raises ValueError unless all replicas have the same order. Collective."""
    if replica.num_replicas == 1:
        return
    digest = zlib.crc32(order.tobytes()) & 0x7FFFFFFF
    own = torch.tensor([digest], dtype=torch.int32).to(replica.device)
    digests = replica.fetch([replica.all_gather(own)])[0].flatten().tolist()
    if len(set(digests)) > 1:
        raise ValueError(
            f"{replica.num_replicas} replicas have {len(set(digests))} different first "
            "orders: give all of them the same seed or equal generators"
        )
