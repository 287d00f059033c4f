"""BatchNorm with frozen statistics: an affine map of each channel."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from per_sample_grad.errors import Refusal
from per_sample_grad.factors.forms import Contribution, accumulation_dtype
from per_sample_grad.layers.call import Call
from per_sample_grad.layers.registry import register_rule
from per_sample_grad.layers.sums import affine, wide_input


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """``input`` and ``grad`` ``(N, C, *)``."""
    module = call.module
    assert isinstance(module, _NormBase)
    if uses_batch_statistics(module):
        raise Refusal("it normalises by statistics of the batch")
    return affine(by_running_statistics(module, wide_input(call)), grad, kept=[1])


def uses_batch_statistics(module: _NormBase) -> bool:
    """Whether a sample's output depends on the rest of the batch."""
    return module.training or module.running_mean is None


def by_running_statistics(module: _NormBase, inputs: torch.Tensor) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps)`` of each channel, ``(N, C, *)``."""
    mean, var = module.running_mean, module.running_var
    assert mean is not None
    assert var is not None
    shape = (1, -1) + (1,) * (inputs.dim() - 2)
    dtype = accumulation_dtype(inputs.dtype)
    scale = torch.rsqrt(var.detach().to(dtype) + module.eps)
    return (inputs - mean.detach().to(dtype).view(shape)) * scale.view(shape)
