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


def windows(
    factor: torch.Tensor, source: torch.Tensor, unfolding: Unfolding
) -> Windows:
    """Returns what a convolution contributes to its weight.

    Each position's patch of ``source`` ``(N, C, *S)`` is multiplied with ``factor``
    ``(N, G p, *P)``.
    """
    # (N, G, P, p), positions before features
    left = factor.flatten(2).unflatten(1, (unfolding.groups, -1)).transpose(2, 3)
    return Windows(left, source, unfolding, math.prod(unfolding.kernel))


def padded(
    inputs: torch.Tensor, widths: Sequence[tuple[int, int]], mode: str
) -> torch.Tensor:
    """Returns ``inputs`` ``(N, C, *S)`` with ``widths`` (before, after) added to S.

    ``mode`` is a convolution's: zeros, reflect, replicate or circular.
    """
    flat = [width for pair in reversed(list(widths)) for width in pair]
    return F.pad(inputs, flat, "constant" if mode == "zeros" else mode)
