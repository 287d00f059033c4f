"""Patches of an image, sequence or volume, by views or, where those cost, by slices.

``F.unfold`` and ``Tensor.unfold`` fall back to the host on XLA, and the former has two
dimensions only and copies slowly. Slices are fused by a compiler, and slow without one.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

import xla_replica
from per_sample_grad.factors.forms import Windows

# oneDNN's convolutions have registers full of channels. Where they do not fill them it
# multiplies matrices, for which each of its threads has buffers as large as the answer.
FAST_CHANNELS = 8


@dataclasses.dataclass(frozen=True)
class Unfolding:
    """What a kernel sees, of any number of samples: `Windows.unfold`."""

    widths: Sequence[tuple[int, int]]  # added before and after each spatial dimension
    mode: str  # what is added, see `padded`
    kernel: Sequence[int]  # sizes of the kernel, K their product
    stride: Sequence[int]
    dilation: Sequence[int]
    positions: Sequence[int]  # how many along each dimension, P their product
    groups: int  # G

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the patches of ``(n, C, *S)`` as ``(n, G, P, C / G * K)``."""
        around = padded(inputs, self.widths, self.mode)
        lazy = xla_replica.traits(inputs).is_lazy
        seen = self.by_slices(around) if lazy else self.by_views(around)
        # (n, G, C / G * K, P), positions before features
        return seen.unflatten(1, (self.groups, -1)).flatten(2, 3).transpose(2, 3)

    def by_views(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the patches of padded inputs ``(n, C, *S)`` as ``(n, C, K, P)``."""
        rank = len(self.kernel)
        copied = self.windows(inputs).contiguous()  # the one copy
        return copied.flatten(2 + rank).flatten(2, 1 + rank)

    def windows(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns views of padded inputs, ``(n, C, *kernel, *positions)``."""
        first, steps = inputs.stride()[:2], inputs.stride()[2:]
        within = [step * factor for step, factor in zip(steps, self.dilation)]
        between = [step * factor for step, factor in zip(steps, self.stride)]
        shape = (*inputs.shape[:2], *self.kernel, *self.positions)
        return inputs.as_strided(shape, (*first, *within, *between))

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

    def prefers_gradients(self, left: torch.Tensor, source: torch.Tensor) -> bool:
        """Returns whether `gradients` is faster than unfolding and multiplying.

        That is measured: on a CPU it is for depthwise convolutions, and for many
        positions and channels that fill its registers.
        """
        channels = source.shape[1] // self.groups
        fast = (
            xla_replica.traits(left).is_host
            and left.dtype == source.dtype == torch.float32
            and math.prod(self.kernel) > 1
        )
        if channels == left.shape[3] == 1:
            return fast
        return (
            fast
            and math.prod(self.positions) >= 64
            and channels % FAST_CHANNELS == 0
            and channels * left.shape[3] <= 64 * math.prod(self.positions)
        )

    def gradients(self, left: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Returns n samples' gradients from both factors: ``(n, r, C / G * K)``."""
        # The gradient of a convolution with a group for each group of each sample.
        n, groups, _, width = left.shape
        channels = source.shape[1] // groups
        if channels == width == 1:
            return self._correlations(left, source)
        source, padding = self._with_padding(source)
        num_rows = n * groups * width
        weight = left.new_empty(()).expand(num_rows, channels, *self.kernel)
        _, found, _ = torch.ops.aten.convolution_backward(
            left.transpose(2, 3).reshape(1, num_rows, *self.positions),
            source.reshape(1, n * groups * channels, *source.shape[2:]),
            weight, [num_rows], self.stride, padding, self.dilation, False,
            [0] * len(self.kernel), n * groups, [False, True, False],
        )  # fmt: skip
        return found.reshape(n, groups * width, -1)

    def _correlations(self, left: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Returns `gradients` of groups with one channel on either side.

        They are the convolution of each channel with what it is multiplied by, in which
        stride and dilation change roles. torch's own way to the gradient of a depthwise
        convolution took up to 16 times as long.
        """
        n, groups, *_ = left.shape
        source, padding = self._with_padding(source)
        if any(width >= size for width, size in zip(padding, self.positions)):
            # oneDNN has no fast way with more zeros than the kernel, here δ, reaches.
            source = padded(source, self.widths, self.mode)
            padding = [0 for _ in padding]
        found = torch.convolution(
            source.reshape(1, n * groups, *source.shape[2:]),
            left.reshape(n * groups, 1, *self.positions),
            None, self.dilation, padding, self.stride, False, [0 for _ in padding],
            n * groups,
        )  # fmt: skip
        for dim, size in enumerate(self.kernel, start=2):
            found = found.narrow(dim, 0, size)
        return found.reshape(n, groups, -1)

    def _with_padding(self, source: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Returns what a convolution takes to see these positions: input and padding.

        It pads with as many zeros on either side, and has as many positions as fit.
        """
        if self.pads_itself(source.shape[2:]):
            return source, [before for before, _ in self.widths]
        source = padded(source, self.widths, self.mode)
        for dim, (size, stride) in enumerate(zip(self.kernel, self.stride)):
            reach = self.dilation[dim] * (size - 1) + 1
            reach += (self.positions[dim] - 1) * stride
            source = source.narrow(2 + dim, 0, reach)
        return source, [0 for _ in self.kernel]

    def pads_itself(self, sizes: Sequence[int]) -> bool:
        """Returns whether a convolution of these sizes has these positions."""
        fits = []
        for dim, (size, (before, after)) in enumerate(zip(sizes, self.widths)):
            reach = self.dilation[dim] * (self.kernel[dim] - 1) + 1
            positions = (size + before + after - reach) // self.stride[dim] + 1
            fits.append(before == after and positions == self.positions[dim])
        return all(fits) and (self.mode == "zeros" or not any(map(any, self.widths)))


def windows(
    factor: torch.Tensor, source: torch.Tensor, unfolding: Unfolding
) -> Windows:
    """Returns what a convolution contributes to its weight.

    Each position's patch of ``source`` ``(N, C, *S)`` is multiplied with ``factor``
    ``(N, G p, *P)``.
    """
    # (N, G, P, p), positions before features
    left = factor.flatten(2).unflatten(1, (unfolding.groups, -1)).transpose(2, 3)
    plain = Windows(left, source, unfolding, math.prod(unfolding.kernel))
    if not unfolding.prefers_gradients(left, source):
        return plain
    channels = source.shape[1] // unfolding.groups
    # Both factors as the convolution lays them out, and the input where it is padded.
    sizes = source.shape[2:]
    times = 1 if unfolding.pads_itself(sizes) and channels > 1 else 2
    sizes = (n + sum(pair) for n, pair in zip(sizes, unfolding.widths))
    return dataclasses.replace(
        plain,
        direct=unfolding.gradients,
        direct_channels=min(FAST_CHANNELS, channels),
        direct_elements=(times * math.prod(sizes), left[0].numel()),
    )


def padded(
    inputs: torch.Tensor, widths: Sequence[tuple[int, int]], mode: str
) -> torch.Tensor:
    """Returns ``inputs`` ``(N, C, *S)`` with ``widths`` (before, after) added to S.

    ``mode`` is a convolution's: zeros, reflect, replicate or circular.
    """
    if mode == "zeros":
        flat = [width for pair in reversed(list(widths)) for width in pair]
        return F.pad(inputs, flat)
    for dim, (before, after) in enumerate(widths, start=2):
        if before or after:
            size = inputs.shape[dim]
            position = torch.arange(-before, size + after, device=inputs.device)
            if mode == "circular":
                position = position.remainder(size)
            elif mode == "replicate":
                position = position.clamp(0, size - 1)
            elif mode == "reflect":
                inside = position.abs()
                position = torch.where(inside < size, inside, 2 * (size - 1) - inside)
            else:
                raise ValueError(f"padding mode {mode!r} is not known")
            inputs = inputs.index_select(dim, position)
    return inputs
