"""LayerNorm: ``Σ_t x̂_t ⊙ δ_t`` and ``Σ_t δ_t``."""

import torch
import torch.nn.functional as F
from torch import nn

from per_sample_grad.factors.forms import Contribution
from per_sample_grad.layers.registry import Call, affine, register_rule, wide_input


@register_rule(nn.LayerNorm)
def layer_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, *, *normalized_shape)``."""
    module = call.module
    assert isinstance(module, nn.LayerNorm)
    shape = list(module.normalized_shape)
    normalized = F.layer_norm(wide_input(call), shape, eps=module.eps)
    kept = range(grad.dim() - len(shape), grad.dim())
    return affine(normalized, grad, kept)
