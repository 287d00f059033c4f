"""Operations as the tables of the RigL paper count them, to compare with these."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import nn

from rigl_xla.layers.weights import weights_of
from rigl_xla.report.costs import LayerCost
from rigl_xla.report.positions import costs_of


def google_costs_of(model: nn.Module, *inputs: Any) -> dict[str, LayerCost]:
    """Returns `costs_of`, with the first convolution as google-research/rigl counts it.

    There the images are padded before the first convolution, which is then counted as
    if it padded them again: for ResNet-50 at 115 by 115 positions instead of 112 by
    112, 0.16 % of all operations. All published ratios of RigL are counted so.

    Args:
        model: A model whose first convolution sees the images themselves.
        inputs: The arguments of a call; the first are images ``(B, C, *sides)``.

    Raises:
        ValueError: It has no convolution, or the first one is transposed, or does not
            fit the images.
    """
    costs = costs_of(model, *inputs)
    convs = [weight for weight in weights_of(model) if weight.is_conv]
    if not convs or convs[0].transposed is not None:
        raise ValueError(
            "the model has no convolution, or a transposed one first, whose padding "
            "could be counted twice; costs_of has no other convention for it"
        )
    first, (channels, *sides) = convs[0], inputs[0].shape[1:]
    conv = first.module
    if len(sides) != len(conv.stride) or channels != conv.in_channels:
        raise ValueError(
            f"the first convolution, {first.name!r}, takes {conv.in_channels} channels "
            f"and {len(conv.stride)} dimensions of pixels, but inputs[0] has shape "
            f"{tuple(inputs[0].shape)}; its images must be what that convolution sees"
        )
    padding = conv.padding
    if isinstance(padding, str):
        padding = [0 if padding == "valid" else (k - 1) // 2 for k in conv.kernel_size]
    positions = math.prod(
        math.ceil((side + 2 * pad) / stride)
        for side, pad, stride in zip(sides, padding, conv.stride)
    )
    costs[first.name] = dataclasses.replace(costs[first.name], positions=positions)
    return costs
