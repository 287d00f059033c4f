"""Sums that several rules take, in float32 or wider."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from per_sample_grad.errors import Refusal
from per_sample_grad.factors.forms import Contribution, Dense, accumulation_dtype
from per_sample_grad.layers.registry import Call


def over_positions(values: torch.Tensor, kept: Sequence[int]) -> torch.Tensor:
    """Returns ``values`` summed over all dimensions but the first and ``kept``."""
    dims = [d for d in range(1, values.dim()) if d not in kept]
    dtype = accumulation_dtype(values.dtype)
    return values.sum(dims, dtype=dtype) if dims else values.to(dtype)


def affine(
    normalized: torch.Tensor, grad: torch.Tensor, kept: Sequence[int]
) -> dict[str, Contribution]:
    """Returns those of ``weight * normalized + bias``: ``Σ x̂ ⊙ δ`` and ``Σ δ``."""
    wide = grad.to(accumulation_dtype(grad.dtype, normalized.dtype))
    return {
        "weight": Dense(over_positions(wide * normalized, kept)),
        "bias": Dense(over_positions(wide, kept)),
    }


def wide_input(call: Call) -> torch.Tensor:
    """Returns the input in float32 or wider, so that normalising does not round it."""
    return call.input.to(accumulation_dtype(call.input.dtype))


def require_batched(inputs: torch.Tensor, num_dims: int) -> None:
    """Raises `Refusal` unless the input has this number of dimensions."""
    if inputs.dim() != num_dims:
        raise Refusal(
            f"its input of shape {tuple(inputs.shape)} has {inputs.dim()} dimensions; "
            f"with a batch dimension it has {num_dims}"
        )
