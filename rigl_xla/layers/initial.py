"""The ways in which first masks and, if asked for, first weights are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rigl_xla.layers.sparse_layer import SparseLayer
from rigl_xla.topology import masks
from rigl_xla.topology.structure import outputs_first

# From a weight to the scores of which the highest begin active; None: at random.
INITIAL_MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "random": None,
    "magnitude": torch.abs,
}


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
