"""Linear, Bilinear and PReLU: sums over the positions of inputs of any rank.

``Σ_t δ_t a_tᵀ`` and ``Σ_t δ_t``, and of a PReLU ``Σ_t min(x_t, 0) ⊙ δ_t``.
"""

import torch
from torch import nn

from per_sample_grad.factors.forms import Contribution, Dense, Outer, accumulation_dtype
from per_sample_grad.layers import registry
from per_sample_grad.layers.registry import Call, register_rule


@register_rule(nn.Linear, reads_module=False)
def linear(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` ``(N, *, q)`` and ``grad`` ``(N, *, p)``."""
    inputs = call.input
    if inputs.dim() < 2:
        registry.require_batched(inputs, 2)
    return _of_product(grad, inputs)


@register_rule(nn.Bilinear, reads_module=False)
def bilinear(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes inputs ``(N, *, q1)`` and ``(N, *, q2)`` and ``grad`` ``(N, *, p)``.

    It is a Linear on the outer product of its two inputs.
    """
    _, *inputs = call.arguments.values()
    first, second = (call.batch_first(each) for each in inputs)
    return _of_product(grad, (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2))


@register_rule(nn.PReLU, reads_module=False)
def prelu(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, C, *)`` or ``(N,)``."""
    number, inputs = call.module.num_parameters, call.input
    # In float32 or wider, so that the product is not rounded.
    products = inputs.to(accumulation_dtype(inputs.dtype)).clamp(max=0) * grad
    found = registry.over_positions(products, kept=[1] if number > 1 else [])
    return {"weight": Dense(found.reshape(-1, number))}


def _of_product(grad: torch.Tensor, inputs: torch.Tensor) -> dict[str, Contribution]:
    """Returns those of ``weight @ inputs + bias``."""
    if inputs.dtype != grad.dtype:  # autocast has rounded them for the layer
        inputs = inputs.to(grad.dtype)
    # (N, G = 1, T, features)
    left, right = (x.reshape(len(x), 1, -1, x.shape[-1]) for x in (grad, inputs))
    bias = Dense(registry.over_positions(grad, kept=[grad.dim() - 1]))
    return {"weight": Outer(left, right), "bias": bias}
