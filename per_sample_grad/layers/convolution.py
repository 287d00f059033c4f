"""Convolutions: the outer products of output gradients and padded input patches.

In transposed ones, input and output gradient change roles.
"""

import torch
from torch import nn

from per_sample_grad.factors.forms import Contribution, Dense
from per_sample_grad.layers import registry
from per_sample_grad.layers.patches import Unfolding, windows
from per_sample_grad.layers.registry import Call, register_rule


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, reads_module=False)
def convolution(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` ``(N, C_in, *S)`` and ``grad`` ``(N, C_out, *P)``.

    Groups of channels are groups of the outer products; positions are the outputs.
    """
    module, inputs = call.module, call.input
    registry.require_batched(inputs, 2 + len(module.kernel_size))
    if inputs.dtype != grad.dtype:  # autocast has rounded them for the layer
        inputs = inputs.to(grad.dtype)
    unfolding = Unfolding(
        padding_widths(module), module.padding_mode, module.kernel_size,
        module.stride, module.dilation, grad.shape[2:], module.groups,
    )  # fmt: skip
    return {
        "weight": windows(grad, inputs, unfolding),
        "bias": Dense(registry.over_positions(grad, kept=[1])),
    }


def padding_widths(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[tuple[int, int]]:
    """Returns how much is added before and after each spatial dimension."""
    if module.padding == "valid":
        return [(0, 0) for _ in module.kernel_size]
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(width), int(width)) for width in module.padding]


@register_rule(
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, reads_module=False
)
def transposed_convolution(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` ``(N, C_in, *P)`` and ``grad`` ``(N, C_out, *S)``.

    The outer products of the input and what each of its positions writes to.
    """
    module, inputs = call.module, call.input
    registry.require_batched(inputs, 2 + len(module.kernel_size))
    if inputs.dtype != grad.dtype:  # autocast has rounded them for the layer
        inputs = inputs.to(grad.dtype)
    widths = []
    for dim, size in enumerate(grad.shape[2:]):
        reach = (inputs.shape[2 + dim] - 1) * module.stride[dim]
        reach += module.dilation[dim] * (module.kernel_size[dim] - 1) + 1
        before = int(module.padding[dim])
        # Nothing is written to what lies beyond (output_padding).
        widths.append((before, max(0, reach - before - size)))
    unfolding = Unfolding(
        widths, "zeros", module.kernel_size, module.stride, module.dilation,
        inputs.shape[2:], module.groups,
    )  # fmt: skip
    return {
        "weight": windows(inputs, grad, unfolding),
        "bias": Dense(registry.over_positions(grad, kept=[1])),
    }
