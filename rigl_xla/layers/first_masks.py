"""A layer with the mask that training begins with."""

from __future__ import annotations

import torch

from rigl_xla.layers.checks import check_kind
from rigl_xla.layers.initial import INITIAL_MASKS
from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer
from rigl_xla.layers.weights import Weight
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import num_inactive


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
