"""The masks, and if asked for the weights, that training begins with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rigl_xla.layers.history import History
from rigl_xla.layers.options import INITIAL_WEIGHTS, Options
from rigl_xla.layers.sparse_layer import SparseLayer, like
from rigl_xla.layers.weights import Weight
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import num_inactive
from rigl_xla.topology.structure import outputs_first


def first_layer_state(weight: Weight, sparsity: float, options: Options) -> SparseLayer:
    """A layer with its first mask; the weight itself is not touched.

    Args:
        weight: The weight.
        sparsity: What it is to have in the end.
        options: How masks begin.

    Raises:
        ValueError: A pattern or a score does not fit the weight.
    """
    parameter = weight.parameter.detach()
    rows, size = options.rows(weight, sparsity), parameter.numel()
    scores = _scores(weight, options)
    active = size - num_inactive(sparsity, size) if rows is None else rows.num_active
    if options.scores().gradual:
        active, mask = size, torch.ones(parameter.shape, dtype=torch.bool)
    elif rows is not None and scores is None:
        mask = rows.random_mask(options.seed, weight.name)
    elif rows is not None:
        scores_RM = rows.cut(scores)
        counts = torch.full((len(scores_RM),), rows.per_row, device=scores.device)
        mask = rows.join(masks.top(scores_RM, counts))
    elif scores is not None:
        count = torch.tensor([active]).to(scores.device)
        mask = masks.top(scores.reshape(1, -1), count).reshape(parameter.shape)
    else:
        flat = masks.random_mask(options.seed, weight.name, size, active)
        mask = flat.reshape(parameter.shape)
    mask = like(parameter, mask)
    history = History.begin(mask, active)
    return SparseLayer(weight, sparsity, active, mask, history, rows)


def _scores(weight: Weight, options: Options) -> torch.Tensor | None:
    """By what a mask is chosen, on any device; None if by chance."""
    if options.initial_masks == "random":
        return None
    if isinstance(options.initial_masks, str):
        return weight.parameter.detach().abs()
    return options.initial_masks[weight.name].detach()


def rescaled(layer: SparseLayer, seed: int) -> torch.Tensor:
    """Weights over the root of the layer's density: outputs vary as before masking."""
    del seed
    return layer.data / layer.mask.to(layer.data.dtype).mean().sqrt()


def fan_in(layer: SparseLayer, seed: int) -> torch.Tensor:
    """New weights of variance 2 / (active inputs of the neuron).

    Evci et al. 2022, arXiv:2010.03533, for networks of ReLUs; one without inputs stays
    zero. A pixel behind a transposed convolution with a stride meets a part of the
    kernel, on average 1 / stride of it in each direction.
    """
    weight, transposed = layer.data, layer.weight.transposed
    draw = masks.generator(seed, f"weights of {layer.name}", 0)
    numbers = torch.randn(weight.shape, generator=draw).to(weight)
    active = outputs_first(layer.mask, transposed).flatten(1).sum(1).clamp(min=1)
    inputs = active.to(weight.dtype)
    if transposed is not None:
        inputs = inputs / math.prod(layer.weight.module.stride)
    factors = (2 / inputs).sqrt().reshape(-1, *[1] * (weight.dim() - 1))
    return outputs_first(outputs_first(numbers, transposed) * factors, transposed)


# By the names that `options` allows.
_WEIGHTS: dict[str, Callable[[SparseLayer, int], torch.Tensor]] = dict(
    zip(INITIAL_WEIGHTS, (rescaled, fan_in))
)


@torch.no_grad()
def set_weights_(layer: SparseLayer, kind: str, seed: int) -> None:
    """Gives a layer that has its first mask weights that suit it, in place."""
    layer.data.copy_(_WEIGHTS[kind](layer, seed))
