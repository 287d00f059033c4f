"""One topology update of all layers, on the device they are on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from rigl_xla.layers.sparse_layer import SparseLayer, keep_
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import num_inactive
from rigl_xla.topology.methods import Layer, Method, Score
from rigl_xla.topology.update_schedule import UpdateSchedule, gradual_sparsity


@dataclasses.dataclass(frozen=True)
class Moment:
    """When an update happens: what scores may depend on besides the layer."""

    step: int
    update: int
    seed: int


def change_(
    layers: Sequence[SparseLayer],
    optimizer: Optimizer,
    method: Method,
    schedule: UpdateSchedule,
    moment: Moment,
) -> None:
    """Drops and grows connections of all layers, from what they have collected."""
    counts = [_next_counts(layer, method, schedule, moment.step) for layer in layers]
    keep, grow = [pair[0] for pair in counts], [pair[1] for pair in counts]
    for layer, new, total in zip(
        layers, new_masks(layers, method, keep, grow, moment), map(sum, counts)
    ):
        install_(layer, new, optimizer)
        layer.num_active = total


def new_masks(
    layers: Sequence[SparseLayer],
    method: Method,
    num_keep: Sequence[int],
    num_grow: Sequence[int],
    moment: Moment,
) -> list[torch.Tensor]:
    """Every layer's next mask, of the same shapes whatever the counts.

    A layer keeps its mask if it has nothing to choose by: if its scores for growth are
    all equal, or one that counts is not finite: of an active connection for dropping,
    of one that is not kept for growth. All do if a weight or a gradient is not finite.

    Args:
        layers: With gradients if the method uses them, all on one device.
        method: How connections are scored.
        num_keep: Active connections that each layer keeps.
        num_grow: Connections that each layer grows.
        moment: When.

    Returns:
        bool tensors of the weights' shapes.
    """
    finite = _all_finite(layers)
    found: dict[int, torch.Tensor] = {}
    device = layers[0].mask.device
    order = [index for group in _groups(layers) for index in group]
    # One upload; two dimensions, so that no number of it becomes part of a program.
    counts = torch.tensor(
        [[num_keep[i] for i in order], [num_grow[i] for i in order]], dtype=torch.int32
    ).to(device)
    first = 0
    for group in _groups(layers):
        counts_2L = counts[:, first : first + len(group)]
        first += len(group)
        chosen = [layers[i] for i in group]
        host = ([num_keep[i] for i in group], [num_grow[i] for i in group])
        new = _group_masks(chosen, method, counts_2L, host, finite, moment)
        found.update(zip(group, new))
    return [found[index] for index in range(len(layers))]


def install_(layer: SparseLayer, new: torch.Tensor, optimizer: Optimizer) -> None:
    """Makes ``new`` the layer's mask.

    Weights and the optimizer's state stay where a connection was and is active, and
    are zero elsewhere: a connection grows from zero. In place, so that whoever shares
    memory with a parameter sees it.
    """
    old = layer.mask
    kept = old & new
    parameter = layer.weight.parameter
    layer.history.record(new, kept)
    keep_(layer.data, kept)
    for tensor in optimizer_state_of(parameter, optimizer):
        keep_(tensor, kept)
    if parameter.grad is not None:
        keep_(parameter.grad.detach(), new)
    layer.mask.copy_(new)


def optimizer_state_of(
    parameter: torch.Tensor, optimizer: Optimizer
) -> Iterator[torch.Tensor]:
    """What the optimizer keeps for each single weight: momentum, second moments."""
    state = optimizer.state.get(parameter)  # not [...], which would make an entry
    for value in (state or {}).values():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            yield value


def _next_counts(
    layer: SparseLayer, method: Method, schedule: UpdateSchedule, step: int
) -> tuple[int, int]:
    """Connections that the layer is to keep and to grow in the update at ``step``."""
    if method.gradual:
        # Of the last update, so that it reaches the final sparsity.
        sparsity = gradual_sparsity(step, layer.sparsity, 0, schedule.last_update)
        left = layer.size - num_inactive(sparsity, layer.size)
        return min(left, layer.num_active), 0
    dropped = schedule.num_dropped(step, layer.num_active)
    grown = dropped if method.grow is not None else 0
    return layer.num_active - dropped, grown


def _group_masks(
    layers: list[SparseLayer],
    method: Method,
    counts_2L: torch.Tensor,
    host: tuple[list[int], list[int]],
    finite: torch.Tensor,
    moment: Moment,
) -> Iterable[torch.Tensor]:
    """Next masks of layers of one size; one layer if it has a pattern."""
    views = [view_of(layer, moment) for layer in layers]
    mask_LN = torch.stack([layer.mask.flatten() for layer in layers])
    drop_LN = _scores(method.drop, views)
    grow_LN = None if method.grow is None else _scores(method.grow, views)
    rows = layers[0].rows
    if rows is not None and grow_LN is not None:
        mask_RM, drop_RM, grow_RM = (
            rows.cut(tensor[0].reshape(rows.shape))
            for tensor in (mask_LN, drop_LN, grow_LN)
        )
        found = masks.drop_and_grow_rows(
            mask_RM, drop_RM, grow_RM, counts_2L[0], rows.per_row
        )
        new_LN, keep_LN = (rows.join(found_RM).reshape(1, -1) for found_RM in found)
    else:
        on_host = host if mask_LN.device.type == "cpu" else None
        new_LN, keep_LN = masks.drop_and_grow(
            mask_LN, drop_LN, grow_LN, counts_2L[0], counts_2L[1], on_host
        )
    usable_L1 = finite & masks.are_finite(drop_LN, mask_LN)
    if grow_LN is not None:
        usable_L1 = usable_L1 & masks.are_finite(grow_LN, ~keep_LN)
        usable_L1 = usable_L1 & masks.has_preference(grow_LN)
    new_LN = torch.where(usable_L1, new_LN, mask_LN)
    return [new.reshape(layer.mask.shape) for new, layer in zip(new_LN, layers)]


def view_of(layer: SparseLayer, moment: Moment) -> Layer:
    """What a score sees of a layer."""
    return Layer(
        name=layer.name,
        weight=layer.data,
        mask=layer.mask,
        gradient=layer.gradient,
        step=moment.step,
        update=moment.update,
        seed=moment.seed,
    )


def _scores(score: Score, views: list[Layer]) -> torch.Tensor:
    found = []
    for view in views:
        values = score(view)
        if not isinstance(values, torch.Tensor) or values.shape != view.weight.shape:
            got = getattr(values, "shape", type(values).__name__)
            raise ValueError(
                f"the score {getattr(score, '__name__', score)!r} gave {got} for "
                f"{view.name!r}; it must return a tensor of the weight's shape, "
                f"{tuple(view.weight.shape)}"
            )
        if not values.is_floating_point():
            values = values.float()
        found.append(values.detach().flatten())
    return torch.stack(found)


def _groups(layers: Sequence[SparseLayer]) -> list[list[int]]:
    """Layers to choose for at once: of equal size, on an accelerator."""
    groups: dict[object, list[int]] = {}
    for index, layer in enumerate(layers):
        alone = layer.rows is not None or layer.mask.device.type == "cpu"
        key = index if alone else (layer.size, layer.data.dtype)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _all_finite(layers: Sequence[SparseLayer]) -> torch.Tensor:
    """bool ``(1,)``: of all layers' weights and gradients."""
    tensors = [layer.data for layer in layers]
    tensors += [layer.gradient for layer in layers if layer.gradient is not None]
    return torch.cat([masks.is_finite(tensor) for tensor in tensors]).all().reshape(1)
