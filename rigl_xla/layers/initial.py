"""The masks that training begins with and, if asked for, the weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from rigl_xla.layers.checks import check_kind
from rigl_xla.layers.sparse_layer import SparseLayer, to_host
from rigl_xla.layers.weights import Weight
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import num_inactive
from rigl_xla.topology.structure import RowPattern, outputs_first
from xla_replica import Replica
from xla_replica.common.arguments import check_names, check_type

if TYPE_CHECKING:
    from rigl_xla.layers.options import Options

INITIAL_MASKS = ("random", "magnitude")

# A weight with this share of the zeros that a mask would make was sparse before.
_SPARSE_BEFORE = 0.5


def initial_layer(weight: Weight, sparsity: float, options: Options) -> SparseLayer:
    """Returns a layer with its first mask; the weight itself is not touched.

    Raises ValueError if a pattern or a score does not fit it, TypeError if it is of a
    kind that cannot be masked.
    """
    check_kind(weight)
    parameter, seed = weight.parameter.detach(), options.seed
    shape, size = tuple(parameter.shape), parameter.numel()
    pattern = options.pattern(weight, sparsity)
    # Without a pattern, all is one row.
    row = RowPattern(shape, size, size - num_inactive(sparsity, size), False)
    rows, given = pattern or row, options.initial_masks
    active = rows.num_active
    if options.method_in_use.gradual:
        active, mask = size, torch.ones(shape, dtype=torch.bool)
    elif given == "random" and pattern is None:
        mask = masks.random_mask(seed, weight.name, size, active).reshape(shape)
    elif given == "random":
        scores = masks.random_scores(seed, weight.name, 0, size)
        mask = rows.best_mask(rows.join(scores))
    else:
        chosen = {weight.name: parameter.abs()} if given == "magnitude" else given
        mask = rows.best_mask(chosen[weight.name].detach())  # on any device
    return SparseLayer(weight, sparsity, active, mask, pattern)


def check_scores(
    scores: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises ValueError or TypeError unless all of ``shapes`` have finite scores."""
    check_type("scores", scores, Mapping, "a dict of tensors by parameter name")
    check_names("scores are needed for", shapes, scores, "the weights that have some")
    for name, shape in shapes.items():
        given = scores[name]
        check_type(f"the scores of {name!r}", given, torch.Tensor, "a tensor")
        fits = given.shape == shape and not (given.is_complex() or given.is_meta)
        if not (fits and bool(torch.isfinite(given).all())):
            raise ValueError(
                f"the scores of {name!r} must be finite real numbers of shape {shape}, "
                f"got {given.dtype} of shape {tuple(given.shape)} on {given.device}"
            )


def warn_of_lost_connections(
    layers: Sequence[SparseLayer], options: Options, replica: Replica, stacklevel: int
) -> None:
    """Warns if random masks replace connections that a model seems to have had before.

    Reads the device once. A weight of zeros alone has no connections to lose.
    """
    if options.initial_masks != "random" or options.method_in_use.gradual:
        return
    counts, lost = [], {}
    for layer in layers:
        connected = layer.data.ne(0)
        counts.append(torch.stack([connected.sum(), (connected & ~layer.mask).sum()]))
    for layer, numbers in zip(layers, to_host(counts, replica)):
        present, dropped = numbers.tolist()
        zeros = layer.size - present
        if dropped and zeros >= _SPARSE_BEFORE * layer.sparsity * layer.size:
            lost[layer.name] = f"{dropped} of {present}"
    if lost:
        name = next(iter(lost))
        warnings.warn(
            f"{len(lost)} of {len(layers)} weights are sparse already, and new random "
            f"masks drop connections that they have: {lost[name]} of {name!r}. To "
            "resume a run, give what the pruner's state_dict() returned as state_dict= "
            "here: loading it later does not bring weights back. To keep the largest "
            "of a pruned model say initial_masks='magnitude'",
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
