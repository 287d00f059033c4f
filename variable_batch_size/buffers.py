"""Makes a model's buffers equal on all replicas.

Replicas see different minibatches and different numbers of them, so BatchNorm's
running statistics drift apart although the weights stay equal. The average here is
weighted by the samples that each replica has seen since the last one.

What it cannot restore: BatchNorm normalises each minibatch by its own statistics, so a
step of n minibatches is not the same function as one large batch. The running mean has
the same expectation as in a large-batch run; the running variance too, because each
minibatch's is unbiased; but a large-batch run moves them once a step, and here a
replica moves them once a minibatch, so their averaging window is shorter.

Integer buffers that a forward pass changes are counts, such as BatchNorm's of
minibatches. Where their values are known from when replicas were last equal, all become
that value and what every replica has added to it since. With ``momentum=None``
BatchNorm's statistics would be means over a replica's own count, and are refused.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.weak import WeakTensorKeyDictionary

from variable_batch_size.device_scalars import dtype_for
from xla_replica import Replica

# Buffers, and their values when they were equal on all replicas; it keeps none alive.
Starts = MutableMapping[torch.Tensor, torch.Tensor]


def follow(model: nn.Module, starts: Starts) -> None:
    """Keeps the values of the model's counts, which are equal on all replicas now.

    Raises ValueError if a BatchNorm has no momentum.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, _NormBase) and layer.momentum is None:
            raise ValueError(f"{name}: momentum=None averages one replica alone")
    for buffer in _counts(model):
        starts[buffer] = buffer.detach().clone()


def guess(model: nn.Module, num_minibatches: int, starts: Starts) -> None:
    """Keeps BatchNorm's counts of before so many minibatches, if nobody has."""
    for layer in model.modules():
        count = getattr(layer, "num_batches_tracked", None)
        if isinstance(layer, _NormBase) and count is not None and layer.training:
            starts.setdefault(count, count.detach() - num_minibatches)


def _counts(model: nn.Module) -> list[torch.Tensor]:
    """Returns the buffers of signed integers."""
    # Others are masks and states of random generators.
    counts = torch.int8, torch.int16, torch.int32, torch.int64
    return [buffer for buffer in model.buffers() if buffer.dtype in counts]


def average_buffers(
    model: nn.Module, num_samples: float, replica: Replica, starts: Starts | None = None
) -> None:
    """Replaces each floating-point buffer by its weighted mean over replicas.

    Collective. A buffer that is equal on all replicas, such as a table of constants,
    stays exactly as it is. With no samples on any replica, buffers become those of
    replica 0. Integer buffers without a start stay as they are.

    Args:
        model: Its buffers, of any floating-point dtype, are changed in place.
        num_samples: The weight of this replica's buffers; with 0 they do not count,
            whatever they hold.
        replica: The replica that the caller runs in.
        starts: Values of counts when they were equal; see `follow`.
    """
    starts = WeakTensorKeyDictionary() if starts is None else starts
    counts = [b for b in _counts(model) if b in starts and b.numel()]
    buffers = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
    if not (buffers or counts) or replica.num_replicas == 1:
        return
    replica.sync()  # what this replica has pending must not enter the common graph
    with torch.no_grad():
        weight, is_base, total = _weights(num_samples, replica)
        values = [buffer.detach().to(dtype_for([buffer])) for buffer in buffers]
        begun = [starts[count] for count in counts]  # guesses may differ
        bases = [torch.where(is_base, v, torch.zeros_like(v)) for v in values + begun]
        replica.all_reduce_(bases)  # zeros from all others
        # Deviations from one of them, not values: equal buffers stay bit for bit, also
        # where they are infinite, as a mask may be.
        deviations = [
            torch.where((v == base) | (weight == 0), torch.zeros_like(v), v - base)
            * weight
            for v, base in zip(values, bases)
        ]
        added = [(b - starts[b]) * (weight > 0) for b in counts]
        replica.all_reduce_([*deviations, *added])
        for buffer, base, deviation in zip(buffers, bases, deviations):
            buffer.copy_(base + deviation / total)
        for count, base, each in zip(counts, bases[len(values) :], added):
            count.copy_(base + each)
        follow(model, starts)
    replica.sync()


def _weights(num_samples: float, replica: Replica) -> tuple[torch.Tensor, ...]:
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
