"""What an update is made from: dense gradients, and how many connections move."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rigl_xla import masks
from rigl_xla.distribution import num_inactive
from rigl_xla.methods import Method
from rigl_xla.schedule import UpdateSchedule, gradual_sparsity
from rigl_xla.update import SparseLayer
from xla_replica import Replica


def collect_(
    layers: Sequence[SparseLayer],
    replica: Replica,
    num_steps: int,
    momentum: float | None = None,
) -> None:
    """Takes the step's dense gradients, of all replicas, into those collected.

    Summed here, not when they are used, so that what is saved is the same on every
    replica and names no number of them.

    Args:
        layers: Their `pending` is used up.
        replica: Sums.
        num_steps: The mean is of so many steps; this one adds its share.
        momentum: Instead, a running mean that keeps so much of its past. A step with
            a gradient that is not finite, in any layer, leaves it as it was.
    """
    several = replica.num_replicas > 1
    if several:
        # What is pending may hold a collective of others: it must be the same program
        # on a replica that had a minibatch and on one that had none.
        replica.sync()
    pending = []
    for layer in layers:
        own, layer.pending = layer.pending, None
        # A layer outside of the loss, or a replica without a minibatch.
        pending.append(torch.zeros_like(layer.data) if own is None else own)
    if several:
        replica.sync()  # zeros, like gradients, enter the sum as data
        replica.sum_(pending)
    if momentum is not None:
        _into_mean_(layers, pending, momentum)
        return
    for layer, dense in zip(layers, pending):
        past = layer.gradient
        if num_steps > 1:
            dense = dense / num_steps
        layer.gradient = dense if past is None else past + dense


def _into_mean_(
    layers: Sequence[SparseLayer], pending: Sequence[torch.Tensor], momentum: float
) -> None:
    """Adds a step to running means, which would keep what is not finite for ever."""
    finite = torch.cat([masks.is_finite(dense) for dense in pending]).all()
    for layer, dense in zip(layers, pending):
        past = torch.zeros_like(dense) if layer.gradient is None else layer.gradient
        mean = past * momentum + dense * (1 - momentum)
        layer.gradient = torch.where(finite, mean, past)


def next_counts(
    layer: SparseLayer, method: Method, schedule: UpdateSchedule, step: int
) -> tuple[int, int]:
    """Connections that the layer is to keep and to grow in the update at ``step``."""
    if method.gradual:
        assert schedule.T_end is not None
        # Of the last update, so that it reaches the final sparsity.
        end = (schedule.T_end - 1) // schedule.delta * schedule.delta
        sparsity = gradual_sparsity(step, layer.sparsity, 0, end)
        left = layer.size - num_inactive(sparsity, layer.size)
        return min(left, layer.num_active), 0
    dropped = schedule.num_dropped(step, layer.num_active)
    grown = dropped if method.grow is not None else 0
    return layer.num_active - dropped, grown
