"""Linear with an input of any rank: weight ``Σ_t δ_t a_tᵀ``, bias ``Σ_t δ_t``."""

import torch
from torch import nn

from per_sample_grad.errors import Refusal
from per_sample_grad.factors.forms import Contribution, Dense, Outer
from per_sample_grad.layers.registry import Call, over_positions, register_rule


@register_rule(nn.Linear)
def linear(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` ``(N, *, q)`` and ``grad`` ``(N, *, p)``."""
    inputs = call.input
    if inputs.dim() < 2:
        raise Refusal(
            f"its input of shape {tuple(inputs.shape)} has no batch dimension beside "
            "the features"
        )
    # (N, G = 1, T, features)
    left = grad.reshape(len(grad), 1, -1, grad.shape[-1])
    right = inputs.reshape(len(inputs), 1, -1, inputs.shape[-1])
    bias = Dense(over_positions(grad, kept=[grad.dim() - 1]))
    return {"weight": Outer(left, right), "bias": bias}
