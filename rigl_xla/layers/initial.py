"""The masks, and if asked for the weights, that training begins with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rigl_xla.layers.checks import check_kind
from rigl_xla.layers.sparse_layer import SparseLayer
from rigl_xla.layers.weights import Weight
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import num_inactive
from rigl_xla.topology.structure import outputs_first

if TYPE_CHECKING:
    from rigl_xla.layers.options import Options

# From a weight to the scores of which the highest begin active; None: at random.
INITIAL_MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "random": None,
    "magnitude": torch.abs,
}


def first_layer_state(weight: Weight, sparsity: float, options: Options) -> SparseLayer:
    """Returns a layer with its first mask; the weight itself is not touched.

    Raises ValueError if a pattern or a score does not fit it, TypeError if it is of a
    kind that cannot be masked.
    """
    check_kind(weight)
    parameter = weight.parameter.detach()
    pattern, size = options.pattern(weight, sparsity), parameter.numel()
    if not isinstance(options.initial_masks, str):
        scores = options.initial_masks[weight.name].detach()  # on any device
    else:
        score = INITIAL_MASKS[options.initial_masks]
        scores = None if score is None else score(parameter)
    active = size - num_inactive(sparsity, size)
    if pattern is not None:
        active = pattern.num_active
    if options.method_in_use.gradual:
        active, mask = size, torch.ones(parameter.shape, dtype=torch.bool)
    elif pattern is not None and scores is None:
        mask = pattern.random_mask(options.seed, weight.name)
    elif pattern is not None:
        mask = pattern.best_mask(scores)
    elif scores is not None:
        count = torch.tensor([active]).to(scores.device)
        mask = masks.top(scores.reshape(1, -1), count).reshape(parameter.shape)
    else:
        flat = masks.random_mask(options.seed, weight.name, size, active)
        mask = flat.reshape(parameter.shape)
    return SparseLayer.with_mask(weight, sparsity, active, mask, pattern)


def rescaled(layer: SparseLayer, seed: int) -> torch.Tensor:
    """Returns weights over the root of the density: outputs vary as before masking."""
    del seed
    return layer.data / layer.mask.to(layer.data.dtype).mean().sqrt()


def fan_in(layer: SparseLayer, seed: int) -> torch.Tensor:
    """Returns new weights of variance 2 / (active inputs of the neuron).

    Evci et al. 2022, arXiv:2010.03533, for ReLUs. A pixel after a transposed
    convolution meets, on average, 1 / stride of the kernel in each direction.
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


# (layer with its first mask, seed) -> the weights it begins with
INITIAL_WEIGHTS: dict[str, Callable[[SparseLayer, int], torch.Tensor]] = {
    "rescale": rescaled,
    "fan-in": fan_in,
}
