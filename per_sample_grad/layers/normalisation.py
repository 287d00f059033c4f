"""Normalisations: an affine map of what is normalised gets ``Σ x̂ ⊙ δ`` and ``Σ δ``.

Also what a capture has to know of those by running or batch statistics.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from per_sample_grad.errors import CouplingError
from per_sample_grad.factors.forms import Contribution, accumulation_dtype
from per_sample_grad.layers import registry
from per_sample_grad.layers.registry import Call, affine, register_rule

# What may normalise by running statistics.
NORMALISING = (_BatchNorm, _InstanceNorm)


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
    registry.require_batched(call.input, 1 + module._get_no_batch_dim())
    if module.training or not module.track_running_stats:
        normalize = functools.partial(F.instance_norm, eps=module.eps)
    else:
        normalize = functools.partial(by_running_statistics, module)
    return affine(call, grad, [1], normalize)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
def batch_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, C, *)``."""
    normalize = functools.partial(by_running_statistics, call.module)
    return affine(call, grad, [1], normalize)


def uses_batch_statistics(module: Any) -> bool:
    """Returns whether a sample's output depends on the rest of the batch."""
    return module.training or module.running_mean is None


def by_running_statistics(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Returns ``(x - mean) / sqrt(var + eps)`` of each channel, ``(N, C, *)``."""
    return standardised(inputs, module.running_mean, module.running_var, module.eps)


def standardised(
    inputs: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float
) -> torch.Tensor:
    """Returns ``(x - mean) / sqrt(var + eps)`` of each channel, ``(N, C, *)``."""
    dtype, shape = accumulation_dtype(inputs.dtype), (1, -1) + (1,) * (inputs.dim() - 2)
    scale = torch.rsqrt(variance.to(dtype) + eps)
    return (inputs - mean.to(dtype).view(shape)) * scale.view(shape)


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raises CouplingError if a BatchNorm in a model normalises by its batch."""
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and uses_batch_statistics(module)
    ]
    if names:
        raise CouplingError(
            f"BatchNorm normalises by statistics of the batch in {', '.join(names)}: "
            "a sample's loss then depends on the other samples, so that a sample has "
            "no gradient of its own. Freeze the statistics (module.eval() on these "
            "modules, with track_running_stats=True), or use GroupNorm or LayerNorm"
        )


def scaled_by_running_statistics(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Returns ``(x - mean) / sqrt(var + eps) * weight + bias``, ``(N, C, *)``."""
    value, shape = (
        by_running_statistics(module, inputs),
        (1, -1, *[1] * (inputs.dim() - 2)),
    )
    if module.weight is not None:
        value = value * module.weight.view(shape)
    return value if module.bias is None else value + module.bias.view(shape)
