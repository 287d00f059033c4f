"""The dense gradients of all replicas, from which an update is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rigl_xla.layers.sparse_layer import SparseLayer
from rigl_xla.topology import masks
from rigl_xla.topology.methods import Method
from rigl_xla.topology.update_schedule import UpdateSchedule
from xla_replica import Replica

# A running mean leaves out the steps in which an optimizer makes its state, so that the
# program of a step that collects nothing is compiled here, and not after the last
# update, when such steps come back.
_FIRST_OF_MEAN = 3


def collects(method: Method, schedule: UpdateSchedule, step: int) -> bool:
    """Returns whether the dense gradients of step number ``step`` are needed."""
    if method.collects == "always":
        first = _FIRST_OF_MEAN if schedule.delta >= _FIRST_OF_MEAN else 1
        return first <= step <= schedule.last_update
    return method.collects == "updates" and schedule.collects(step)


def is_collecting(method: Method, schedule: UpdateSchedule, step: int) -> bool:
    """Returns whether after ``step`` there are gradients that later steps add to."""
    used_up = method.collects == "updates" and schedule.is_update(step)
    goes_on = collects(method, schedule, step + 1)
    return collects(method, schedule, step) and goes_on and not used_up


def begin_(
    layers: Sequence[SparseLayer],
    method: Method,
    schedule: UpdateSchedule,
    step: int,
    compiles: bool,
) -> None:
    """Lets go of what was collected up to ``step``.

    On a device that ``compiles``, zeros take its place where updates are made from
    several steps: the first of these steps, and the last update, after which nothing
    is collected, are then the same programs as the others.
    """
    adds = method.collects == "always" or (
        method.collects == "updates" and schedule.grad_accumulation_n > 1
    )
    zeros = compiles and adds and step <= schedule.last_update
    for layer in layers:
        layer.gradient = torch.zeros_like(layer.data) if zeros else None


def collect_(
    layers: Sequence[SparseLayer],
    replica: Replica,
    num_steps: int,
    momentum: float | None = None,
) -> None:
    """Adds the step's dense gradients, of all replicas, to those collected.

    Summed here, not when they are used, so that what is saved is the same on every
    replica and names no number of them. With ``momentum`` a running mean keeps so much
    of its past; without, this is one of ``num_steps`` that a mean is of.
    """
    several = replica.num_replicas > 1
    if several:
        # What is pending may include a collective, which must be in the same program on
        # a replica that had a minibatch and on one that had none.
        replica.sync()
    pending = []
    for layer in layers:
        own, layer.pending = layer.pending, None
        # A layer outside of the loss, or a replica without a minibatch.
        pending.append(torch.zeros_like(layer.data) if own is None else own)
    if several:
        replica.sync()  # zeros, like gradients, enter the sum as data
        replica.all_reduce_(pending)
    if momentum is None:
        for layer, dense in zip(layers, pending):
            past = layer.gradient
            if num_steps > 1:
                dense = dense / num_steps
            layer.gradient = dense if past is None else past + dense
        return
    # A running mean would keep a NaN for ever: such a step leaves all as they were.
    finite = torch.cat([masks.is_finite(dense) for dense in pending]).all()
    for layer, dense in zip(layers, pending):
        past = torch.zeros_like(dense) if layer.gradient is None else layer.gradient
        mean = past * momentum + dense * (1 - momentum)
        layer.gradient = torch.where(finite, mean, past)
