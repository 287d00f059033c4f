"""One topology update of all layers, on their device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.optim import Optimizer

from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer, zero_inactive_
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import num_inactive
from rigl_xla.topology.methods import Layer, Method, Score
from rigl_xla.topology.update_schedule import gradual_sparsity
from rigl_xla.update.optimizer_state import follow_mask_
from xla_replica import traits

# Layers that are chosen for together are copied into one tensor, which is sorted: two
# dozen bytes for each of so many weights.
_WEIGHTS_IN_GROUP = 2**25


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
    layer_at = functools.partial(Layer, step=step, update=update, seed=options.seed)
    # One upload; two dimensions, so that no number of it becomes part of a program.
    counts_2L = torch.tensor(list(zip(*counts)), dtype=torch.int32)
    counts_2L = counts_2L.to(layers[0].mask.device)
    new: list[torch.Tensor] = []
    for group in groups:
        part_2L = counts_2L[:, len(new) : len(new) + len(group)]
        new += _group_masks(group, method, part_2L, finite, layer_at)
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
        left = layer.size - num_inactive(sparsity, layer.size)
        return min(left, layer.num_active), 0
    dropped = options.num_dropped(step, layer.num_active)
    grown = dropped if method.grow is not None else 0
    return layer.num_active - dropped, grown


def _group_masks(
    layers: list[SparseLayer],
    method: Method,
    counts_2L: torch.Tensor,
    finite: torch.Tensor,
    layer_at: Callable[..., Layer],
) -> Iterable[torch.Tensor]:
    """Returns next masks of layers of one size; of one layer if it has a pattern."""
    views = [layer_at(x.name, x.data, x.mask, x.gradient) for x in layers]
    mask_LN = torch.stack([layer.mask.flatten() for layer in layers])
    drop_LN = _scores(method.drop, views)
    grow_LN = None if method.grow is None else _scores(method.grow, views)
    pattern = layers[0].pattern
    if pattern is not None and grow_LN is not None:
        cut = [
            pattern.cut(tensor[0].reshape(pattern.shape))
            for tensor in (mask_LN, drop_LN, grow_LN)
        ]
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


def _scores(score: Score, views: list[Layer]) -> torch.Tensor:
    """Returns ``(L, N)``: a score of layers of one size."""
    scores = []
    for view in views:
        values = score(view)
        if not isinstance(values, torch.Tensor) or values.shape != view.weight.shape:
            got = getattr(values, "shape", type(values).__name__)
            raise ValueError(
                f"the score {getattr(score, '__name__', score)!r} gave {got} for "
                f"{view.name!r}; it must return a tensor of the weight's shape, "
                f"{tuple(view.weight.shape)}"
            )
        values = values if values.is_floating_point() else values.float()
        scores.append(values.detach().flatten())
    return torch.stack(scores)


def _groups(layers: Sequence[SparseLayer]) -> list[list[SparseLayer]]:
    """Returns groups of layers to choose for at once: on accelerators, of one size."""
    groups: dict[object, list[SparseLayer]] = {}
    for layer in layers:
        alone = layer.pattern is not None or traits(layer.mask).is_host
        key = layer.name if alone else (layer.size, layer.data.dtype)
        groups.setdefault(key, []).append(layer)
    parts = []
    for group in groups.values():
        length = max(1, _WEIGHTS_IN_GROUP // max(1, group[0].size))
        parts += [group[i : i + length] for i in range(0, len(group), length)]
    return parts
