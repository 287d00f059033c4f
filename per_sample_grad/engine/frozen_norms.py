"""Frozen normalisation on lazy XLA tensors, whose own backward pass fails there.

The XLA backend of torch 2.9 raises in the backward pass of a BatchNorm or InstanceNorm
that uses running statistics ("The size of mean should be compatible with feature
count"). During a capture such a module's output is therefore computed again from
arithmetic: equal up to rounding, and the module's own operation is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm


def needs_arithmetic(module: nn.Module) -> bool:
    """Whether this is a normalisation with running statistics on an XLA device."""
    return (
        isinstance(module, _BatchNorm | _InstanceNorm)
        and not module.training
        and module.running_mean is not None
        and module.running_mean.device.type == "xla"
    )


def replace_output(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: torch.Tensor,
) -> torch.Tensor:
    """A forward hook: ``(x - mean) / sqrt(var + eps) * weight + bias``."""
    assert isinstance(module, _NormBase)
    assert module.running_mean is not None
    assert module.running_var is not None
    value = args[0] if args else kwargs["input"]
    shape = (1, -1) + (1,) * (output.dim() - 2)
    scale = torch.rsqrt(module.running_var + module.eps)
    if module.weight is not None:
        scale = scale * module.weight
    centred = value - module.running_mean.view(shape)
    value = centred * scale.view(shape)
    if module.bias is not None:
        value = value + module.bias.view(shape)
    return value.to(output.dtype)
