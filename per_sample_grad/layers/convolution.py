"""Convolutions: the outer products of output gradients and padded input patches.

In transposed ones, input and output gradient change roles. Patches of an image, a
sequence or a volume are views or, where those cost, slices: ``F.unfold`` and
``Tensor.unfold`` fall back to the host on XLA, and the former has two dimensions only
and copies slowly. Slices are fused by a compiler, and slow without one.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import xla_replica
from per_sample_grad.factors.forms import Contribution, Dense, Windows
from per_sample_grad.layers import registry
from per_sample_grad.layers.registry import Call, register_rule


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, reads_module=False)
def convolution(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` ``(N, C_in, *S)`` and ``grad`` ``(N, C_out, *P)``.

    Groups of channels are groups of the outer products; positions are the outputs.
    """
    module, inputs = call.module, _input(call, grad)
    widths, mode = padding_widths(module), module.padding_mode
    return {"weight": windows(module, grad, inputs, widths, mode), "bias": _bias(grad)}


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
    module, inputs, widths = call.module, _input(call, grad), []
    for dim, size in enumerate(grad.shape[2:]):
        reach = (inputs.shape[2 + dim] - 1) * module.stride[dim]
        reach += module.dilation[dim] * (module.kernel_size[dim] - 1) + 1
        before = int(module.padding[dim])
        # Nothing is written to what lies beyond (output_padding).
        widths.append((before, max(0, reach - before - size)))
    weight = windows(module, inputs, grad, widths, "zeros")
    return {"weight": weight, "bias": _bias(grad)}


def _input(call: Call, grad: torch.Tensor) -> torch.Tensor:
    inputs = call.input
    registry.require_batched(inputs, 2 + len(call.module.kernel_size))
    return inputs.to(grad.dtype)  # autocast has rounded them for the layer


def windows(
    layer: Any,
    factor: torch.Tensor,
    source: torch.Tensor,
    widths: Sequence[tuple[int, int]],
    mode: str,
) -> Windows:
    """Returns what a convolution contributes to its weight.

    Each position's patch of ``source`` ``(N, C, *S)`` is multiplied with ``factor``
    ``(N, G p, *P)``.

    Args:
        layer: Has the convolution's ``kernel_size``, ``stride``, ``dilation`` and
            ``groups``.
        widths: How much is added to ``source``, before and after each of S.
        mode: What is added, as a convolution's ``padding_mode``.
    """
    sizes = layer.kernel_size, layer.stride, layer.dilation, factor.shape[2:]
    unfolding = Unfolding(widths, mode, *sizes, layer.groups)
    # (N, G, P, p), positions before features
    left = factor.flatten(2).unflatten(1, (layer.groups, -1)).transpose(2, 3)
    return Windows(left, source, unfolding, math.prod(layer.kernel_size))


def _bias(grad: torch.Tensor) -> Dense:
    return Dense(registry.over_positions(grad, kept=[1]))


@dataclasses.dataclass(frozen=True)
class Unfolding:
    """What a kernel sees, of any number of samples: `Windows.unfold`."""

    widths: Sequence[tuple[int, int]]  # added before and after each spatial dimension
    mode: str  # what is added: zeros, reflect, replicate or circular
    kernel: Sequence[int]  # sizes of the kernel, K their product
    stride: Sequence[int]
    dilation: Sequence[int]
    positions: Sequence[int]  # how many along each dimension, P their product
    groups: int  # G

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the patches of ``(n, C, *S)`` as ``(n, G, P, C / G * K)``."""
        flat = [width for pair in reversed(self.widths) for width in pair]
        around = F.pad(inputs, flat, "constant" if self.mode == "zeros" else self.mode)
        lazy = xla_replica.traits(inputs).is_lazy
        seen = self.by_slices(around) if lazy else self.by_views(around)
        # (n, G, C / G * K, P), positions before features
        return seen.unflatten(1, (self.groups, -1)).flatten(2, 3).transpose(2, 3)

    def by_views(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the patches of padded inputs ``(n, C, *S)`` as ``(n, C, K, P)``."""
        first, steps = inputs.stride()[:2], inputs.stride()[2:]
        within = [step * factor for step, factor in zip(steps, self.dilation)]
        between = [step * factor for step, factor in zip(steps, self.stride)]
        shape = (*inputs.shape[:2], *self.kernel, *self.positions)
        views, rank = inputs.as_strided(shape, (*first, *within, *between)), len(steps)
        copied = views.contiguous()  # the one copy
        return copied.flatten(2 + rank).flatten(2, 1 + rank)

    def by_slices(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the same as `by_views`, for a device that compiles."""
        views = []
        for offset in itertools.product(*(range(size) for size in self.kernel)):
            index = [slice(None), slice(None)]
            for dim, at in enumerate(offset):
                first, stride = at * self.dilation[dim], self.stride[dim]
                last = first + (self.positions[dim] - 1) * stride
                index.append(slice(first, last + 1, stride))
            views.append(inputs[tuple(index)])
        return torch.stack(views, 2).flatten(3)
