"""LayerNorm, RMSNorm, GroupNorm and InstanceNorm: sums of ``x̂ ⊙ δ`` and ``δ``.

What has running statistics as BatchNorm is in `batch_norm`.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from per_sample_grad.factors.forms import Contribution, accumulation_dtype
from per_sample_grad.layers.batch_norm import by_running_statistics
from per_sample_grad.layers.registry import (
    Call,
    affine,
    register_rule,
    require_batched,
)


@register_rule(nn.LayerNorm, reads_module=False)
def layer_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, *, *normalized_shape)``."""
    shape = list(call.module.normalized_shape)
    kept = range(grad.dim() - len(shape), grad.dim())
    normalize = functools.partial(
        F.layer_norm, normalized_shape=shape, eps=call.module.eps
    )
    return affine(call, grad, kept, normalize)


@register_rule(nn.RMSNorm, reads_module=False)
def rms_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, *, *normalized_shape)``."""
    kept = range(grad.dim() - len(call.module.normalized_shape), grad.dim())
    eps = call.module.eps
    if eps is None:  # torch's default is that of the dtype it computes in
        eps = torch.finfo(accumulation_dtype(call.input.dtype)).eps

    def normalize(inputs: torch.Tensor) -> torch.Tensor:
        square = inputs.square().mean(tuple(kept), keepdim=True)
        return inputs * torch.rsqrt(square + eps)

    return affine(call, grad, kept, normalize)


@register_rule(nn.GroupNorm, reads_module=False)
def group_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, C, *)``."""
    normalize = functools.partial(
        F.group_norm, num_groups=call.module.num_groups, eps=call.module.eps
    )
    return affine(call, grad, [1], normalize)


# Its running statistics, which it may read, are written to by every call in torch 2.9.
@register_rule(
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, reads_module=False
)
def instance_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, C, *S)``."""
    module = call.module
    require_batched(call.input, 1 + module._get_no_batch_dim())
    if module.training or not module.track_running_stats:
        normalize = functools.partial(F.instance_norm, eps=module.eps)
    else:
        normalize = functools.partial(by_running_statistics, module)
    return affine(call, grad, [1], normalize)
