"""Patches of an image, sequence or volume, as slices: no operation leaves the device.

``F.unfold`` and ``Tensor.unfold`` fall back to the host on XLA, and the former has two
dimensions only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F


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
    views = []
    for offset in itertools.product(*(range(size) for size in kernel)):
        view = inputs
        for dim, at in enumerate(offset):
            first = at * dilation[dim]
            last = first + (positions[dim] - 1) * stride[dim]
            index = [slice(None)] * view.dim()
            index[dim + 2] = slice(first, last + 1, stride[dim])
            view = view[tuple(index)]
        views.append(view.flatten(2))
    return torch.stack(views, 2)
