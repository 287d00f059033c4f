"""Makes a model's floating-point buffers equal on all replicas.

Replicas see different minibatches and different numbers of them, so BatchNorm's
running statistics drift apart although the weights stay equal. The average here is
weighted by the samples that each replica has seen since the last one.

What it cannot restore: BatchNorm normalises each minibatch by its own statistics, so a
step of n minibatches is not the same function as one large batch. The running mean has
the same expectation as in a large-batch run; the running variance too, because each
minibatch's is unbiased; but a large-batch run moves them once a step, and here a
replica moves them once a minibatch, so their averaging window is shorter.
"""

from __future__ import annotations

import torch
from torch import nn

from variable_batch_size.device_scalars import dtype_for
from xla_replica import Replica


def average_buffers(model: nn.Module, num_samples: float, replica: Replica) -> None:
    """Replaces each floating-point buffer by its weighted mean over replicas.

    Collective. A buffer that is equal on all replicas, such as a table of constants,
    stays exactly as it is. With no samples on any replica, buffers become those of
    replica 0. Integer buffers stay as they are.

    Args:
        model: Its buffers, of any floating-point dtype, are changed in place.
        num_samples: The weight of this replica's buffers; with 0 they do not count,
            whatever they hold.
        replica: The replica that the caller runs in.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
    if not buffers or replica.num_replicas == 1:
        return
    replica.sync()  # what this replica has pending must not enter the common graph
    with torch.no_grad():
        weight, is_base, total = _weights(num_samples, replica)
        values = [buffer.detach().to(dtype_for([buffer])) for buffer in buffers]
        bases = [torch.where(is_base, v, torch.zeros_like(v)) for v in values]
        replica.all_reduce_(bases)  # zeros from all others
        # Deviations from one of them, not values: equal buffers stay bit for bit, also
        # where they are infinite, as a mask may be.
        deviations = [
            torch.where((v == base) | (weight == 0), torch.zeros_like(v), v - base)
            * weight
            for v, base in zip(values, bases)
        ]
        replica.all_reduce_(deviations)
        for buffer, base, deviation in zip(buffers, bases, deviations):
            buffer.copy_(base + deviation / total)
    replica.sync()


def _weights(
    num_samples: float, replica: Replica
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns this replica's weight, whether it is the base, and the sum of weights.

    All have shape ``()`` and are on the device. The base is the first replica with a
    weight, or replica 0.
    """
    integer = torch.int32  # TPUs emulate 64 bits
    ranks = torch.arange(replica.num_replicas, dtype=integer, device=replica.device)
    is_me = ranks == replica.scalar(replica.rank, integer)
    weights = replica.all_gather(replica.scalar(num_samples)).reshape(-1)
    weights = torch.where(weights.sum() > 0, weights, (ranks == 0).float())
    counts = weights > 0
    is_base = counts & (counts.cumsum(0, dtype=integer) == 1)
    return (weights * is_me).sum(), (is_base & is_me).any(), weights.sum()
