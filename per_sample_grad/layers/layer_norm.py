"""LayerNorm: ``Σ_t x̂_t ⊙ δ_t`` and ``Σ_t δ_t``."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from per_sample_grad.factors.forms import Contribution
from per_sample_grad.layers.registry import Call, affine, register_rule


@register_rule(nn.LayerNorm)
def layer_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, *, *normalized_shape)``."""
    module = call.module
    shape = list(module.normalized_shape)
    kept = range(grad.dim() - len(shape), grad.dim())
    normalize = functools.partial(F.layer_norm, normalized_shape=shape, eps=module.eps)
    return affine(call, grad, kept, normalize)
