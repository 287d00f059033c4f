"""What an optimizer keeps for each weight, where connections are dropped and grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from rigl_xla.layers.sparse_layer import SparseLayer, zero_inactive_
from xla_replica.device.selection import kth_largest

# States that are rates, not sums (Rprop's), with the value torch begins them at.
_INITIAL: dict[str, Callable[[dict[str, Any]], float]] = {
    "step_size": lambda group: float(group["lr"])
}
# One in so many connections moves further than the percentile that bounds new ones.
_ONE_IN = 10


def state_of(
    parameter: torch.Tensor, optimizer: Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what the optimizer keeps for each weight: momentum, second moments."""
    state = optimizer.state.get(parameter)  # not [...], which would make an entry
    for name, value in (state or {}).items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            yield name, value


def follow_mask_(
    layer: SparseLayer,
    new: torch.Tensor,
    optimizer: Optimizer,
    num_kept: torch.Tensor | None,
) -> None:
    """Makes the optimizer's state that of a new mask, in place.

    It is zero but for connections that were active and still are. Of those that grow,
    rates begin at their initial value, and second moments where
    `bounded_second_moment` says, or without ``num_kept`` at zero, too.
    """
    parameter, kept = layer.weight.parameter, layer.mask & new
    state = dict(state_of(parameter, optimizer))
    first, second = state.get("exp_avg"), state.get("exp_avg_sq")
    begins: dict[str, Any] = {}
    if num_kept is not None and first is not None and second is not None:
        bounded = bounded_second_moment(first, second, layer.gradient, kept, num_kept)
        begins = {"exp_avg_sq": bounded, "max_exp_avg_sq": bounded}
    for name in _INITIAL.keys() & state.keys():
        begins[name] = _INITIAL[name](_group_of(parameter, optimizer))
    for name, tensor in state.items():
        zero_inactive_(tensor, kept)
        if name in begins:
            grown = new & ~layer.mask
            tensor.copy_(torch.where(grown, begins[name], tensor))


def bounded_second_moment(
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor | None,
    kept: torch.Tensor,
    num_kept: torch.Tensor,
) -> torch.Tensor:
    """Returns second moments with which new connections move no further than others.

    A moment m of zero and a second one v of zero make Adam's first steps three times
    the learning rate, where others move a tenth of it, since their gradients change
    their signs. With r the 90th percentile of ``|m| / sqrt(v)`` over the connections
    that stay, and g the gradient by which one grows, ``v = (g / r)²`` makes a step of r
    times the learning rate while its gradient is g. It is at least the mean of v, which
    it is without a gradient. ``kept`` is bool, and ``num_kept`` their number, ``()``.
    """
    zero = second.new_zeros(())
    known = kept & (second > 0)
    ratios = torch.where(known, first.abs() / second.sqrt(), zero)
    counts = (num_kept // _ONE_IN).clamp(min=1).reshape(1, 1)
    ratio = kth_largest(ratios.reshape(1, -1), counts).reshape(())
    mean = torch.where(kept, second, zero).sum() / num_kept.clamp(min=1)
    if gradient is None:
        return mean
    bound = torch.where(ratio > 0, (gradient / ratio).square(), zero)
    return torch.maximum(bound.to(second.dtype), mean)


def _group_of(parameter: torch.Tensor, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's parameter group of a parameter."""
    groups = optimizer.param_groups
    return next(g for g in groups if any(each is parameter for each in g["params"]))
