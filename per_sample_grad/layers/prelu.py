"""PReLU: ``Σ min(x, 0) ⊙ δ``, one slope or one for each channel."""

import torch
from torch import nn

from per_sample_grad.factors.forms import Contribution, Dense
from per_sample_grad.layers import registry
from per_sample_grad.layers.registry import Call, register_rule


@register_rule(nn.PReLU)
def prelu(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, C, *)`` or ``(N,)``."""
    module, inputs = call.module, registry.wide_input(call)
    assert isinstance(module, nn.PReLU)
    products = inputs.clamp(max=0) * grad
    if module.num_parameters > 1:
        return {"weight": Dense(registry.over_positions(products, kept=[1]))}
    return {"weight": Dense(registry.over_positions(products, kept=[]).unsqueeze(1))}
