"""RMSNorm: a LayerNorm without mean and bias."""

import torch
from torch import nn

from per_sample_grad.factors.forms import Contribution, accumulation_dtype
from per_sample_grad.layers.registry import Call, affine, register_rule


@register_rule(nn.RMSNorm)
def rms_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, *, *normalized_shape)``."""
    module = call.module
    kept = range(grad.dim() - len(module.normalized_shape), grad.dim())
    eps = module.eps
    if eps is None:  # torch's default is that of the dtype it computes in
        eps = torch.finfo(accumulation_dtype(call.input.dtype)).eps

    def normalize(inputs: torch.Tensor) -> torch.Tensor:
        square = inputs.square().mean(tuple(kept), keepdim=True)
        return inputs * torch.rsqrt(square + eps)

    return affine(call, grad, kept, normalize)
