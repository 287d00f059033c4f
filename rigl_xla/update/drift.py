"""Whether replicas still have the same masks and sparse weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rigl_xla.layers.sparse_layer import SparseLayer
from xla_replica import Replica, ReplicaError

# Two primes below 2**16: no two indices below their product, 4.29e9, have the same pair
# of remainders. Sums of 2**31 factors fit an int64.
_PRIMES = (65_521, 65_519)
_STEPS = (40_503, 30_011)
_PART = 2**24  # weights looked at together
_COMPARED = ("masks", "weights that are not finite", "weights")


@torch.no_grad()
def check_equal(layers: Sequence[SparseLayer], replica: Replica) -> None:
    """Gathers three numbers of every layer and compares them; see `check_replicas`."""
    if replica.num_replicas == 1 or not layers:
        return
    columns_3L = [torch.stack(column) for column in zip(*map(_numbers, layers))]
    own = [column_L.tolist() for column_L in replica.fetch(columns_3L)]
    gathered = replica.all_gather_object(own)
    for what, columns_RL in zip(_COMPARED, zip(*gathered)):
        values_LR = zip(*columns_RL)
        names = [
            layer.name
            for layer, values_R in zip(layers, values_LR)
            if any(value != values_R[0] for value in values_R)
        ]
        if names:
            raise ReplicaError(
                f"{what} differ between replicas in {names}. Replicas must begin with "
                "the same weights (replica.seeded, broadcast_ or DDP), step with the "
                "same summed gradients, and all call the pruner in every step"
            )


def _numbers(layer: SparseLayer) -> list[torch.Tensor]:
    """Returns hashes of the mask and of where weights are not finite, and their sum."""
    parts = []  # one after the other: all at once would need memory
    pairs = zip(layer.mask.flatten().split(_PART), layer.data.flatten().split(_PART))
    for number, (mask, data) in enumerate(pairs):
        factors = _factors(number * _PART, len(mask), mask.device)
        zeros, finite = torch.zeros_like(factors), torch.isfinite(data)
        first = torch.where(mask, factors, zeros).sum()
        second = torch.where(finite, zeros, factors).sum()
        # Different factors, so that signs and places matter too, not only sizes.
        terms = torch.where(finite, data, torch.zeros_like(data)).double() * factors
        parts.append((first, second, terms.sum()))
    return [torch.stack(numbers).sum() for numbers in zip(*parts)]


def _factors(begin: int, size: int, device: torch.device) -> torch.Tensor:
    """Returns int64 from 1 to 2**32, all different for indices below 4.29e9."""
    index = torch.arange(begin, begin + size, dtype=torch.int64, device=device)
    high, low = ((index * step) % prime for step, prime in zip(_STEPS, _PRIMES))
    return high * _PRIMES[1] + low + 1
