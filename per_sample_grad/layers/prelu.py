"""PReLU: ``Σ min(x, 0) ⊙ δ``, one slope or one for each channel."""

import torch
from torch import nn

from per_sample_grad.factors.forms import Contribution, Dense, accumulation_dtype
from per_sample_grad.layers import registry
from per_sample_grad.layers.registry import Call, register_rule


@register_rule(nn.PReLU, reads_module=False)
def prelu(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, C, *)`` or ``(N,)``."""
    module, inputs = call.module, call.input
    # In float32 or wider, so that the product is not rounded.
    inputs = inputs.to(accumulation_dtype(inputs.dtype))
    products = inputs.clamp(max=0) * grad
    if module.num_parameters > 1:
        return {"weight": Dense(registry.over_positions(products, kept=[1]))}
    return {"weight": Dense(registry.over_positions(products, kept=[]).unsqueeze(1))}
