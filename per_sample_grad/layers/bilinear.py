"""Bilinear: a Linear on the outer product of its two inputs."""

import torch
from torch import nn

from per_sample_grad.errors import Refusal
from per_sample_grad.factors.forms import Contribution, Dense, Outer
from per_sample_grad.layers.registry import Call, over_positions, register_rule


@register_rule(nn.Bilinear)
def bilinear(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes inputs ``(N, *, q1)`` and ``(N, *, q2)`` and ``grad`` ``(N, *, p)``."""
    values = [*call.args, *call.kwargs.values()]
    if len(values) != 2:
        raise Refusal(f"a Bilinear takes two inputs, not {len(values)}")
    first, second = (call.batch_first(value) for value in values)
    if call.kwargs and not call.args and next(iter(call.kwargs)) == "input2":
        first, second = second, first
    product = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)
    left = grad.reshape(len(grad), 1, -1, grad.shape[-1])
    right = product.reshape(len(product), 1, -1, product.shape[-1])
    bias = Dense(over_positions(grad, kept=[grad.dim() - 1]))
    return {"weight": Outer(left, right), "bias": bias}
