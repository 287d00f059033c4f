"""The masks, and if asked for the weights, that training begins with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rigl_xla import masks
from rigl_xla.distribution import num_inactive
from rigl_xla.layers import Weight
from rigl_xla.options import INITIAL_WEIGHTS, Options
from rigl_xla.sparse_layer import SparseLayer, like


def first_layer_state(weight: Weight, sparsity: float, options: Options) -> SparseLayer:
    """A layer with its first mask; the weight itself is not touched.

    Args:
        weight: The weight.
        sparsity: What it is to have in the end.
        options: How masks begin.

    Raises:
        ValueError: A pattern does not fit the weight.
    """
    parameter = weight.parameter.detach()
    rows, size = options.rows(weight, sparsity), parameter.numel()
    method = options.scores()
    if method.gradual:
        active, mask = size, torch.ones(parameter.shape, dtype=torch.bool)
    elif rows is not None and options.initial_masks == "random":
        active, mask = rows.num_active, rows.random_mask(options.seed, weight.name)
    elif rows is not None:
        scores_RM = rows.cut(parameter.abs())
        counts = torch.full((len(scores_RM),), rows.per_row, device=parameter.device)
        active, mask = rows.num_active, rows.join(masks.top(scores_RM, counts))
    elif options.initial_masks == "magnitude":
        active = size - num_inactive(sparsity, size)
        count = torch.tensor([active]).to(parameter.device)
        mask = masks.top(parameter.abs().reshape(1, -1), count).reshape(parameter.shape)
    else:
        active = size - num_inactive(sparsity, size)
        flat = masks.random_mask(options.seed, weight.name, size, active)
        mask = flat.reshape(parameter.shape)
    return SparseLayer(weight, sparsity, active, like(parameter, mask), rows)


def rescaled(
    weight: torch.Tensor, mask: torch.Tensor, seed: int, name: str
) -> torch.Tensor:
    """Weights over the root of the layer's density: outputs vary as before masking."""
    del seed, name
    return weight / mask.to(weight.dtype).mean().sqrt()


def fan_in(
    weight: torch.Tensor, mask: torch.Tensor, seed: int, name: str
) -> torch.Tensor:
    """New weights of variance 2 / (active inputs of the neuron).

    Evci et al. 2022, arXiv:2010.03533, for networks of ReLUs; one without inputs stays
    zero.
    """
    draw = masks.generator(seed, f"weights of {name}", 0)
    numbers = torch.randn(weight.shape, generator=draw).to(weight)
    inputs = mask.flatten(1).sum(1).clamp(min=1).to(weight.dtype)
    return numbers * (2 / inputs).sqrt().reshape(-1, *[1] * (weight.dim() - 1))


# By the names that `options` allows.
_WEIGHTS: dict[str, Callable[..., torch.Tensor]] = dict(
    zip(INITIAL_WEIGHTS, (rescaled, fan_in))
)


@torch.no_grad()
def set_weights_(layer: SparseLayer, kind: str, seed: int) -> None:
    """Gives a layer that has its first mask weights that suit it, in place."""
    value = _WEIGHTS[kind](layer.data, layer.mask, seed, layer.name)
    layer.data.copy_(value)
