"""Normalisations: an affine map of what is normalised gets ``Σ x̂ ⊙ δ`` and ``Σ δ``.

Also what a capture has to know of those by running or batch statistics.
"""

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from per_sample_grad.errors import CouplingError
from per_sample_grad.factors.forms import Contribution, accumulation_dtype
from per_sample_grad.layers import registry
from per_sample_grad.layers.registry import Call, affine, register_rule
from xla_replica import traits

# What may normalise by running statistics.
NORMALISING = (_BatchNorm, _InstanceNorm)
_OWN = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


# The running statistics of an InstanceNorm, which it may read, are written to by every
# call in torch 2.9.
@register_rule(*_OWN, *_INSTANCE, reads_module=False)
def by_own_statistics(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` and ``grad`` ``(N, C, *)`` or ``(N, *, *normalized_shape)``."""
    module, kept = call.module, range(1, 2)
    if isinstance(module, _InstanceNorm):
        registry.require_batched(call.input, 1 + module._get_no_batch_dim())
        if module.track_running_stats and not module.training:
            return batch_norm(call, grad)
    elif not isinstance(module, nn.GroupNorm):
        kept = range(grad.dim() - len(module.normalized_shape), grad.dim())
    plain = copy.copy(module)  # without weight, bias and running statistics
    for held in ("_parameters", "_buffers"):
        vars(plain)[held] = dict.fromkeys(vars(module)[held])
    return affine(call, grad, kept, plain.forward)


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


def right_output(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: torch.Tensor
) -> torch.Tensor | None:
    """Returns, as a forward hook, the same numbers with a gradient on lazy devices.

    The backward pass of a normalisation by running statistics raises there in torch 2.9
    ("The size of mean should be compatible with feature count"). The module's own
    operation never runs: nothing asks a lazy device for its result.
    """
    if uses_batch_statistics(module) or not traits(output).is_lazy:
        return None
    inputs = args[0] if args else kwargs["input"]
    shape = (1, -1, *[1] * (inputs.dim() - 2))
    value = by_running_statistics(module, inputs)
    if module.weight is not None:
        value = value * module.weight.view(shape)
    if module.bias is not None:
        value = value + module.bias.view(shape)
    return value.to(output.dtype)
