"""InstanceNorm: each channel normalised by its own or by running statistics."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from per_sample_grad.factors.forms import Contribution
from per_sample_grad.layers import registry
from per_sample_grad.layers.batch_norm import by_running_statistics
from per_sample_grad.layers.registry import Call, register_rule


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, C, *S)``."""
    module = call.module
    num_dims = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
    registry.require_batched(call.input, num_dims[type(module)])
    if module.training or not module.track_running_stats:
        normalize = functools.partial(F.instance_norm, eps=module.eps)
    else:
        normalize = functools.partial(by_running_statistics, module)
    return registry.affine(call, grad, [1], normalize)
