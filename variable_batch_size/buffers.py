"""Makes a model's floating-point buffers equal on all replicas.

Replicas see different minibatches and different numbers of them, so BatchNorm's
running statistics drift apart although the weights stay equal. The average here is
weighted by the samples each replica has seen since the last one.

What it cannot restore: BatchNorm normalises each minibatch by its own statistics, so a
step of n minibatches is not the same function as one large batch. The running mean has
the same expectation as in a large-batch run; the running variance too, because each
minibatch's is unbiased; but a large-batch run moves them once a step, and here a
replica moves them once a minibatch, so their averaging window is shorter.
"""

from __future__ import annotations

import torch
from torch import nn

from xla_replica import Replica


def average_buffers(model: nn.Module, num_samples: float, replica: Replica) -> None:
    """Replaces each floating-point buffer by its weighted mean over replicas.

    Collective. A buffer that is equal on all replicas, such as a table of constants,
    stays exactly as it is. With no samples on any replica, buffers become those of
    replica 0. Integer buffers stay as they are.

    Args:
        model: Its buffers, of any floating-point dtype, are changed in place.
        num_samples: What this replica's buffers weigh; 0 gives them no say, whatever
            they hold.
        replica: The replica that the caller runs in.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
    if not buffers:
        return
    with torch.no_grad():
        total = replica.scalar(num_samples)
        weight = total.clone().reshape(())  # zero dimensions broadcast over any buffer
        # Deviations from replica 0, not values: equal buffers then stay bit for bit.
        reference = [buffer.detach().clone() for buffer in buffers]
        replica.broadcast_(reference)
        deviations = [
            torch.where(weight > 0, (buffer - base) * weight, torch.zeros_like(base))
            for buffer, base in zip(buffers, reference)
        ]
        replica.sum_([*deviations, total])
        divisor = torch.clamp(total, min=1.0).reshape(())
        for buffer, base, deviation in zip(buffers, reference, deviations):
            buffer.copy_(base + deviation / divisor)
    replica.sync()
