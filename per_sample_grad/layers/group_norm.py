"""GroupNorm: sums over space of ``x̂ ⊙ δ`` and ``δ``."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from per_sample_grad.factors.forms import Contribution
from per_sample_grad.layers.registry import Call, affine, register_rule


@register_rule(nn.GroupNorm)
def group_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, C, *)``."""
    module = call.module
    normalize = functools.partial(
        F.group_norm, num_groups=module.num_groups, eps=module.eps
    )
    return affine(call, grad, [1], normalize)
