"""A layer with the mask that training begins with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from rigl_xla.layers.checks import check_kind
from rigl_xla.layers.initial import INITIAL_MASKS
from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer, to_host
from rigl_xla.layers.weights import Weight
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import num_inactive
from xla_replica import Replica

# A weight with this share of the zeros that a mask would make was sparse before.
_SPARSE_BEFORE = 0.5


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


def warn_of_lost_connections(
    layers: Sequence[SparseLayer], options: Options, replica: Replica, stacklevel: int
) -> None:
    """Warns if random masks replace connections that a model seems to have had before.

    Reads the device once. A weight of zeros alone has no connections to lose.
    """
    if options.initial_masks != "random" or options.method_in_use.gradual or not layers:
        return
    counts, lost = [], {}
    for layer in layers:
        connected = layer.data.ne(0)
        counts.append(torch.stack([connected.sum(), (connected & ~layer.mask).sum()]))
    for layer, (present, dropped) in zip(
        layers, to_host([torch.stack(counts)], replica)[0].tolist()
    ):
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
