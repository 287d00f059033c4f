"""The weights that training begins with, if asked for, and those that it loses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch

from rigl_xla.layers.sparse_layer import SparseLayer
from rigl_xla.topology import masks
from rigl_xla.topology.structure import outputs_first
from xla_replica import Replica

# A weight with this share of the zeros that a mask would make was sparse before.
_SPARSE_BEFORE = 0.5


def warn_of_lost_connections(
    layers: Sequence[SparseLayer], replica: Replica, stacklevel: int
) -> None:
    """Warns if random masks replace connections that a model seems to have had before.

    Reads the device once. A weight of zeros alone has no connections to lose.
    """
    counts, lost = [], []
    for layer in layers:
        connected = layer.data.ne(0)
        counts.append(torch.stack([connected.sum(), (connected & ~layer.mask).sum()]))
    for layer, numbers in zip(layers, replica.fetch(counts)):
        present, dropped = numbers.tolist()
        zeros = layer.size - present
        if dropped and zeros >= _SPARSE_BEFORE * layer.sparsity * layer.size:
            lost.append(f"{dropped} of {present} connections of {layer.name!r}")
    if lost:
        warnings.warn(
            f"{len(lost)} of {len(layers)} weights are sparse already, and random "
            f"masks drop {lost[0]}: to resume, give the saved state_dict= here; "
            "initial_masks='magnitude' keeps the largest of a pruned model",
            stacklevel=stacklevel + 1,
        )


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
