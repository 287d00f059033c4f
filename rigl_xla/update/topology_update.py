"""One topology update of all layers, and of the optimizer's state, on their device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer, zero_inactive_
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import num_inactive
from rigl_xla.topology.methods import Layer, Method, Score
from rigl_xla.topology.update_schedule import gradual_sparsity
from xla_replica import traits
from xla_replica.device.selection import kth_largest

# Layers that are chosen for together are copied into one tensor, which is sorted: two
# dozen bytes for each of so many weights.
_WEIGHTS_IN_GROUP = 2**25
# One in so many connections moves further than the percentile that bounds new ones.
_ONE_IN = 10


def change_(
    layers: Sequence[SparseLayer],
    optimizer: Optimizer,
    options: Options,
    step: int,
    update: int,
) -> None:
    """Drops and grows connections of all layers, by the gradients they collected.

    A layer keeps its mask if it has nothing to choose by: if its scores for growth are
    all equal, or if a score that counts is not finite (for dropping, that of an active
    connection; for growth, that of one that is not kept). All layers keep theirs if
    any weight or gradient is not finite.

    What was not active before grows from zero; for the optimizer's state see
    `follow_mask_`. All in place, so that everything that shares memory with a parameter
    sees it.
    """
    method = options.method_in_use
    tensors = [layer.data for layer in layers]
    tensors += [layer.gradient for layer in layers if layer.gradient is not None]
    finite = torch.cat([masks.is_finite(tensor) for tensor in tensors]).all().reshape(1)
    groups = _groups(layers)
    ordered = [layer for group in groups for layer in group]
    counts = [_next_counts(layer, options, step) for layer in ordered]
    # One upload; two dimensions, so that no number of it becomes part of a program.
    counts_2L = torch.tensor(list(zip(*counts)), dtype=torch.int32)
    counts_2L = counts_2L.to(layers[0].mask.device)
    new: list[torch.Tensor] = []
    for group in groups:
        views = [
            Layer(x.name, x.data, x.mask, x.gradient, step, update, options.seed)
            for x in group
        ]
        part_2L = counts_2L[:, len(new) : len(new) + len(group)]
        new += _group_masks(views, group[0].pattern, method, part_2L, finite)
    for number, (layer, mask, numbers) in enumerate(zip(ordered, new, counts)):
        parameter, kept = layer.weight.parameter, layer.mask & mask
        num_kept = counts_2L[0, number] if options.bound_new_steps else None
        zero_inactive_(layer.data, kept)
        follow_mask_(layer, mask, optimizer, num_kept)
        if parameter.grad is not None:
            zero_inactive_(parameter.grad.detach(), mask)
        layer.replace_mask_(mask, kept)
        layer.num_active = sum(numbers)


def _next_counts(layer: SparseLayer, options: Options, step: int) -> tuple[int, int]:
    """Returns how many connections the update keeps and how many it grows."""
    method = options.method_in_use
    if method.gradual:
        # It ends with the last update, so that this one reaches the final sparsity.
        sparsity = gradual_sparsity(step, layer.sparsity, 0, options.last_update)
        left = layer.mask.numel() - num_inactive(sparsity, layer.mask.numel())
        return min(left, layer.num_active), 0
    dropped = options.num_dropped(step, layer.num_active)
    grown = dropped if method.grow is not None else 0
    return layer.num_active - dropped, grown


def _group_masks(
    layers: list[Layer],
    pattern: masks.RowPattern | None,
    method: Method,
    counts_2L: torch.Tensor,
    finite: torch.Tensor,
) -> list[torch.Tensor]:
    """Returns next masks of layers of one size; of one layer if it has a pattern."""
    mask_LN = torch.stack([layer.mask.flatten() for layer in layers])
    drop_LN = _scores(method.drop, layers)
    grow_LN = None if method.grow is None else _scores(method.grow, layers)
    if pattern is not None and grow_LN is not None:
        cut = [pattern.cut(each) for each in (mask_LN, drop_LN, grow_LN)]
        rows = masks.drop_and_grow(*cut, *counts_2L, pattern.per_row)
        new_LN, keep_LN = (pattern.join(found_RM).reshape(1, -1) for found_RM in rows)
    else:
        new_LN, keep_LN = masks.drop_and_grow(mask_LN, drop_LN, grow_LN, *counts_2L)
    usable_L1 = finite & masks.are_finite(drop_LN, mask_LN)
    if grow_LN is not None:
        usable_L1 = usable_L1 & masks.are_finite(grow_LN, ~keep_LN)
        usable_L1 = usable_L1 & masks.has_preference(grow_LN)
    new_LN = torch.where(usable_L1, new_LN, mask_LN)
    return [new.reshape(layer.mask.shape) for new, layer in zip(new_LN, layers)]


def _scores(score: Score, layers: list[Layer]) -> torch.Tensor:
    """Returns ``(L, N)``: a score of layers of one size."""
    scores = []
    for layer in layers:
        found, shape = score(layer), tuple(layer.weight.shape)
        if not isinstance(found, torch.Tensor) or found.shape != shape:
            got = getattr(found, "shape", type(found).__name__)
            raise ValueError(
                f"the score {getattr(score, '__name__', score)!r} gave {got} for "
                f"{layer.name!r}; it must give a tensor of the weight's shape, {shape}"
            )
        found = found if found.is_floating_point() else found.float()
        scores.append(found.detach().flatten())
    return torch.stack(scores)


def _groups(layers: Sequence[SparseLayer]) -> list[list[SparseLayer]]:
    """Returns groups of layers to choose for at once: on accelerators, of one size."""
    groups: dict[object, list[SparseLayer]] = {}
    for layer in layers:
        alone = layer.pattern is not None or traits(layer.mask).is_host
        key = layer.name if alone else (layer.mask.numel(), layer.data.dtype)
        groups.setdefault(key, []).append(layer)
    parts = []
    for group in groups.values():
        length = max(1, _WEIGHTS_IN_GROUP // max(1, group[0].mask.numel()))
        parts += [group[i : i + length] for i in range(0, len(group), length)]
    return parts


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
    if "step_size" in state:  # Rprop's: a rate, not a sum
        groups = optimizer.param_groups
        own = (g for g in groups if any(each is parameter for each in g["params"]))
        begins["step_size"] = float(next(own)["lr"])
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
