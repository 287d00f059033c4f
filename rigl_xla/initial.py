"""The masks that training begins with."""

from __future__ import annotations

import torch

from rigl_xla import masks
from rigl_xla.distribution import num_inactive
from rigl_xla.layers import Weight
from rigl_xla.options import Options
from rigl_xla.update import SparseLayer


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
    mask = mask.contiguous().to(parameter.device)
    return SparseLayer(weight, sparsity, active, mask, rows)
