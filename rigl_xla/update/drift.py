"""Whether replicas still have the same masks and sparse weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from rigl_xla.layers.sparse_layer import SparseLayer
from xla_replica import Replica, ReplicaError

_COMPARED = ("masks", "weights that are not finite", "weights")


def check_equal(layers: Sequence[SparseLayer], replica: Replica) -> None:
    """Compares hashes of all masks and weights; see `RigLScheduler.check_replicas`."""
    if replica.num_replicas == 1 or not layers:
        return
    tensors = [tensor for layer in layers for tensor in (layer.mask, layer.data)]
    host = iter(replica.fetch(tensors))
    own = [_hashes(next(host), next(host)) for _ in layers]
    hashes_LR = list(zip(*replica.all_gather_object(own)))
    for number, what in enumerate(_COMPARED):
        names = [
            layer.name
            for layer, hashes_R in zip(layers, hashes_LR)
            if len({hashes[number] for hashes in hashes_R}) > 1
        ]
        if names:
            raise ReplicaError(
                f"{what} differ between replicas in {names}. Replicas must begin with "
                "the same weights (replica.seeded, broadcast_ or DDP), step with the "
                "same summed gradients, and all call the pruner in every step"
            )


def _hashes(mask: torch.Tensor, weight: torch.Tensor) -> list[str]:
    """Returns hashes of a mask, of where a weight is finite, and of its numbers."""
    finite = torch.isfinite(weight)
    numbers = torch.where(finite, weight, 0) + 0.0  # zeros have one sign
    parts = (each.contiguous().view(torch.uint8) for each in (mask, finite, numbers))
    return [hashlib.sha256(part.numpy()).hexdigest() for part in parts]
