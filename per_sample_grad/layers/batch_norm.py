"""BatchNorm with frozen statistics: an affine map of each channel.

Also what a capture has to know of normalisations by running or batch statistics.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

import xla_replica
from per_sample_grad.errors import CouplingError, Refusal
from per_sample_grad.factors.forms import Contribution, accumulation_dtype
from per_sample_grad.layers.registry import Call, affine, register_rule

# What may normalise by running statistics.
NORMALISING = (_BatchNorm, _InstanceNorm)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
def batch_norm(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` of shape ``(N, C, *)``."""
    module = call.module
    if uses_batch_statistics(module):
        raise Refusal("it normalises by statistics of the batch")
    return affine(call, grad, [1], functools.partial(by_running_statistics, module))


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


def output_by_arithmetic(
    module: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: torch.Tensor,
) -> torch.Tensor | None:
    """Returns, as a forward hook, ``(x - mean) / sqrt(var + eps) * weight + bias``.

    The XLA backend of torch 2.9 raises in the backward pass of a BatchNorm or
    InstanceNorm that uses running statistics ("The size of mean should be compatible
    with feature count"). The module's own operation never runs: nothing asks a lazy
    device for its result. Elsewhere nothing is replaced.
    """
    if uses_batch_statistics(module) or not xla_replica.traits(output).is_lazy:
        return None
    value = by_running_statistics(module, args[0] if args else kwargs["input"])
    shape = (1, -1) + (1,) * (output.dim() - 2)
    if module.weight is not None:
        value = value * module.weight.view(shape)
    if module.bias is not None:
        value = value + module.bias.view(shape)
    return value.to(output.dtype)
