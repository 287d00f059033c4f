"""Whether replicas still have the same masks and sparse weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rigl_xla.sparse_layer import SparseLayer
from xla_replica import Replica, ReplicaError

_PRIME = 65_521  # below 2**16: sums of 2**40 weights fit an int64


@torch.no_grad()
def check_equal(layers: Sequence[SparseLayer], replica: Replica) -> None:
    """Gathers a hash of every mask and a sum of every weight, and compares.

    Raises:
        ReplicaError: They differ; it names the layers.
    """
    if replica.num_replicas == 1 or not layers:
        return
    hashes_L = torch.stack([_hash(layer.mask) for layer in layers])
    sums_L = torch.stack([layer.data.double().abs().sum() for layer in layers])
    replica.sync()  # what this replica did before is no part of the collective
    gathered = [replica.gather(hashes_L), replica.gather(sums_L)]
    hashes_RL, sums_RL = replica.fetch(gathered)
    for what, values_RL in [("masks", hashes_RL), ("weights", sums_RL)]:
        differs_L = (values_RL != values_RL[:1]).any(0).tolist()
        names = [layer.name for layer, differs in zip(layers, differs_L) if differs]
        if names:
            raise ReplicaError(
                f"{what} differ between replicas in {names}. Replicas must begin with "
                "the same weights (replica.seeded, broadcast_ or DDP), step with the "
                "same summed gradients, and all call the pruner in every step"
            )


def _hash(mask: torch.Tensor) -> torch.Tensor:
    """An integer, another one for nearly every other mask."""
    flat = mask.flatten()
    index = torch.arange(flat.numel(), dtype=torch.int64, device=flat.device)
    factors = (index * 40_503 + 12_345) % _PRIME
    return torch.where(flat, factors, torch.zeros_like(factors)).sum()
