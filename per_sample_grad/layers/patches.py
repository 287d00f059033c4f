"""Patches of an image, sequence or volume: views, or slices where those are no views.

``F.unfold`` and ``Tensor.unfold`` fall back to the host on XLA, and the former has two
dimensions only and copies slowly. Slices are fused by a compiler, and slow without one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from per_sample_grad.factors.forms import Windows
from xla_replica import traits

# oneDNN's convolutions have registers full of channels. Where they do not fill them it
# multiplies matrices, for which each of its threads has buffers as large as the answer.
FAST_CHANNELS = 8


@dataclasses.dataclass(frozen=True)
class Unfolding:
    """What a kernel sees, of any number of samples: `Windows.unfold`.

    Attributes:
        widths: What is added before and after each spatial dimension.
        mode: What is added, see `padded`.
        kernel: As for `patches`, and so are the others.
        groups: G.
    """

    widths: Sequence[tuple[int, int]]
    mode: str
    kernel: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    positions: Sequence[int]
    groups: int

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """``(n, C, *S)`` to ``(n, G, P, C / G * K)``."""
        seen = patches(
            padded(inputs, self.widths, self.mode),
            self.kernel, self.stride, self.dilation, self.positions,
        )  # fmt: skip
        # (n, G, C / G * K, P), positions before features
        return seen.unflatten(1, (self.groups, -1)).flatten(2, 3).transpose(2, 3)

    def is_slower(self, left: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether `gradients` is faster than unfolding and multiplying.

        As measured on a CPU, where one convolution of the whole batch, a group for
        each sample, is: of many positions, and of channels that fill its registers.
        """
        channels = source.shape[1] // self.groups
        return (
            traits(left).is_host
            and left.dtype == source.dtype == torch.float32
            and math.prod(self.kernel) > 1
            and math.prod(self.positions) >= 64
            and channels % FAST_CHANNELS == 0
            and channels * left.shape[3] <= 64 * math.prod(self.positions)
        )

    def gradients(self, left: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Of n samples, from left factors and sources: ``(n, r, C / G * K)``.

        The gradient of a convolution with a group for each group of each sample.
        """
        n, groups, _, width = left.shape
        channels = source.shape[1] // groups
        outer = padded(source, self.widths, self.mode)
        for dim, (size, stride) in enumerate(zip(self.kernel, self.stride)):
            reach = self.dilation[dim] * (size - 1) + 1
            reach += (self.positions[dim] - 1) * stride
            outer = outer.narrow(2 + dim, 0, reach)
        weight = left.new_empty(()).expand(n * groups * width, channels, *self.kernel)
        _, found, _ = torch.ops.aten.convolution_backward(
            left.transpose(2, 3).reshape(1, n * groups * width, *self.positions),
            outer.reshape(1, n * groups * channels, *outer.shape[2:]),
            weight, None, self.stride, [0] * len(self.kernel), self.dilation,
            False, [0] * len(self.kernel), n * groups, [False, True, False],
        )  # fmt: skip
        return found.reshape(n, groups * width, -1)


def windows(left: torch.Tensor, source: torch.Tensor, unfolding: Unfolding) -> Windows:
    """What a convolution contributes: ``left`` ``(N, G, P, p)`` of ``(N, C, *S)``."""
    kernel = math.prod(unfolding.kernel)
    if not unfolding.is_slower(left, source):
        return Windows(left, source, unfolding, kernel)
    # Both factors twice: as they are given to the convolution, and as it lays them out.
    sizes = (n + sum(pair) for n, pair in zip(source.shape[2:], unfolding.widths))
    return Windows(
        left,
        source,
        unfolding,
        kernel,
        direct=unfolding.gradients,
        direct_channels=FAST_CHANNELS,
        direct_elements=(2 * math.prod(sizes), 2 * left[0].numel()),
    )


def padded(
    inputs: torch.Tensor, widths: Sequence[tuple[int, int]], mode: str
) -> torch.Tensor:
    """``inputs`` ``(N, C, *S)`` with ``widths`` (before, after) added to each of S.

    ``mode`` is a convolution's: zeros, reflect, replicate or circular.
    """
    if mode == "zeros":
        flat = [width for pair in reversed(list(widths)) for width in pair]
        return F.pad(inputs, flat)
    for dim, (before, after) in enumerate(widths, start=2):
        if before or after:
            size = inputs.shape[dim]
            position = torch.arange(-before, size + after, device=inputs.device)
            inputs = inputs.index_select(dim, _source(position, size, mode))
    return inputs


def _source(position: torch.Tensor, size: int, mode: str) -> torch.Tensor:
    if mode == "circular":
        return position.remainder(size)
    if mode == "replicate":
        return position.clamp(0, size - 1)
    if mode == "reflect":
        inside = position.abs()
        return torch.where(inside < size, inside, 2 * (size - 1) - inside)
    raise ValueError(f"no padding mode {mode!r}")


def patches(
    inputs: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    positions: Sequence[int],
) -> torch.Tensor:
    """``(N, C, *S)`` to ``(N, C, K, P)``: what each of P positions sees.

    Args:
        inputs: Already padded, at least as large as the positions need.
        kernel: Sizes of the kernel, K their product.
        stride: Between positions.
        dilation: Between elements of the kernel.
        positions: How many along each dimension, P their product.
    """
    if traits(inputs).is_lazy:
        return _by_slices(inputs, kernel, stride, dilation, positions)
    view = inputs
    for dim, size in enumerate(kernel, start=2):
        reach = dilation[dim - 2] * (size - 1) + 1
        view = view.unfold(dim, reach, stride[dim - 2])  # the window comes last
        view = view[..., :: dilation[dim - 2]].narrow(dim, 0, positions[dim - 2])
    rank = len(kernel)
    order = [0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank)]
    copied = view.permute(order).contiguous()  # the one copy
    return copied.flatten(2 + rank).flatten(2, 1 + rank)


def _by_slices(
    inputs: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    positions: Sequence[int],
) -> torch.Tensor:
    views = []
    for offset in itertools.product(*(range(size) for size in kernel)):
        view = inputs
        for dim, at in enumerate(offset):
            first = at * dilation[dim]
            last = first + (positions[dim] - 1) * stride[dim]
            index = [slice(None)] * view.dim()
            index[dim + 2] = slice(first, last + 1, stride[dim])
            view = view[tuple(index)]
        views.append(view)
    return torch.stack(views, 2).flatten(3)
