"""How often a forward pass uses each weight, watched in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from rigl_xla.flops import LayerCost
from rigl_xla.layers import weights_of


@torch.no_grad()
def costs_of(model: nn.Module, *inputs: Any) -> dict[str, LayerCost]:
    """The cost of every weight that can be sparse, per sample of ``inputs``.

    Runs one forward pass in evaluation mode.

    Args:
        model: Any module.
        inputs: What it is called with; the first is a tensor whose first dimension
            counts samples.

    Returns:
        By parameter name, in order of registration; layers that the pass does not
        reach cost nothing.
    """
    weights = weights_of(model)
    uses = {weight.name: 0.0 for weight in weights}
    num_samples = inputs[0].shape[0]
    handles = []
    for weight in weights:
        module = _caller(model, weight.module)

        def watch(
            module: nn.Module, args: Any, output: Any, name: str = weight.name
        ) -> None:
            uses[name] += _num_uses(module, args, output) / num_samples

        handles.append(module.register_forward_hook(watch))
    training = {module: module.training for module in model.modules()}
    model.eval()
    # Attention has a fast path that calls nothing that could be watched.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in training.items():
            module.training = mode
        for handle in handles:
            handle.remove()
    return {
        weight.name: LayerCost(tuple(weight.parameter.shape), uses[weight.name])
        for weight in weights
    }


def _caller(model: nn.Module, module: nn.Module) -> nn.Module:
    """The module whose call uses the weight: attention projects by itself."""
    for parent in model.modules():
        if isinstance(parent, nn.MultiheadAttention) and parent.out_proj is module:
            return parent
    return module


def _num_uses(module: nn.Module, args: Any, output: Any) -> float:
    """Applications of the weight to a vector in one call."""
    if isinstance(module, nn.MultiheadAttention):
        return args[0].numel() / args[0].shape[-1]
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return args[0].numel() / args[0].shape[-1]
    if isinstance(module, _ConvNd):
        if module.transposed:  # every input pixel meets the whole kernel
            return args[0].numel() / module.in_channels
        return output.numel() / module.out_channels
    return output.numel() / output.shape[-1]
