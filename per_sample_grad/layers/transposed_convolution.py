"""Transposed convolutions: input and output gradient change roles."""

import torch
from torch import nn

from per_sample_grad.factors.forms import Contribution, Dense
from per_sample_grad.layers import registry
from per_sample_grad.layers.patches import Unfolding, windows
from per_sample_grad.layers.registry import Call, register_rule


@register_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def transposed_convolution(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` ``(N, C_in, *P)`` and ``grad`` ``(N, C_out, *S)``.

    The outer products of the input and what each of its positions writes to.
    """
    module, inputs = call.module, call.input
    registry.require_batched(inputs, 2 + len(module.kernel_size))
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
