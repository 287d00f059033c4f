"""Whether replicas still have the same masks and sparse weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rigl_xla.layers.sparse_layer import SparseLayer
from xla_replica import Replica, ReplicaError

# Two primes below 2**16: an index below their product, 4.29e9, has a pair of remainders
# of its own. Sums of 2**31 factors fit an int64.
_PRIMES = (65_521, 65_519)
_STEPS = (40_503, 30_011)
_PART = 2**24  # weights looked at together


@torch.no_grad()
def check_equal(layers: Sequence[SparseLayer], replica: Replica) -> None:
    """Gathers three numbers of every layer, and compares; see `check_replicas`.

    Raises:
        ReplicaError: They differ; it names the layers.
    """
    if replica.num_replicas == 1 or not layers:
        return
    numbers = [_numbers(layer) for layer in layers]
    hashes_L2 = torch.stack([torch.stack(pair[:2]) for pair in numbers])
    sums_L = torch.stack([pair[2] for pair in numbers])
    replica.sync()  # what this replica did before is no part of the collective
    gathered = [replica.all_gather(hashes_L2), replica.all_gather(sums_L)]
    hashes_RL2, sums_RL = replica.fetch(gathered)
    for what, values_RL in [
        ("masks", hashes_RL2[:, :, 0]),
        ("weights that are not finite", hashes_RL2[:, :, 1]),
        ("weights", sums_RL),
    ]:
        differs_L = (values_RL != values_RL[:1]).any(0).tolist()
        names = [layer.name for layer, differs in zip(layers, differs_L) if differs]
        if names:
            raise ReplicaError(
                f"{what} differ between replicas in {names}. Replicas must begin with "
                "the same weights (replica.seeded, broadcast_ or DDP), step with the "
                "same summed gradients, and all call the pruner in every step"
            )


def _numbers(layer: SparseLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hashes of the mask and of where weights are not finite; a sum of all others."""
    pairs = zip(layer.mask.flatten().split(_PART), layer.data.flatten().split(_PART))
    parts = [_part(i * _PART, mask, data) for i, (mask, data) in enumerate(pairs)]
    first, second, third = (torch.stack(numbers).sum() for numbers in zip(*parts))
    return first, second, third


def _part(
    begin: int, mask: torch.Tensor, data: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_numbers` of the weights from ``begin`` on: of all at once takes much memory."""
    factors = _factors(begin, len(mask), mask.device)
    finite = torch.isfinite(data)
    # Different factors, so that signs and places matter too, not only sizes.
    terms = torch.where(finite, data, torch.zeros_like(data)).double() * factors
    return _hash(mask, factors), _hash(~finite, factors), terms.sum()


def _hash(chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return torch.where(chosen, factors, torch.zeros_like(factors)).sum()


def _factors(begin: int, size: int, device: torch.device) -> torch.Tensor:
    """int64, each from 1 to 2**32, and each another one below 4.29e9."""
    index = torch.arange(begin, begin + size, dtype=torch.int64, device=device)
    high, low = ((index * step) % prime for step, prime in zip(_STEPS, _PRIMES))
    return high * _PRIMES[1] + low + 1
