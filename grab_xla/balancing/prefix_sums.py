"""The herding of an order: how far its prefix sums are from a straight line.

The herding of vectors z_1 ... z_n with mean m in the order s is

    max over k of || sum_(t <= k) (z_s(t) - m) ||,

which grows like the square root of n for random orders and hardly grows for balanced
ones. It determines how fast training in that order converges: Lu, Guo and De Sa 2022
(arXiv:2205.10733).

Nothing reads a device. `herding` takes the whole set at once, `prefix_norms` one batch
after another.

Axes: B rows of a batch, D columns (of this shard, where columns are sharded).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grab_xla.balancing.decisions import squared_norms

# How many numbers `herding` copies at once: 16 MiB in float32.
_PIECE = 2**22


class Herding(NamedTuple):
    """The largest norm of a prefix sum; tensors of shape ``(1,)`` on the device.

    Attributes:
        infinity: The infinity norm, as in the GraB papers.
        euclidean: The 2-norm.
    """

    infinity: Tensor
    euclidean: Tensor


def prefix_norms(
    before_D: Tensor, batches: Iterable[Tensor], mean_D: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sum of all centred rows so far, and norms of those up to each row.

    One sum runs through all batches, so the result does not depend on where they end.
    Where columns are sharded, the norms over all columns are the maximum of the shards'
    infinity norms and the sum of their squares, row by row. (The herdings cannot be
    combined: the prefix that is longest in all columns may be longest in no shard.)

    Args:
        before_D: The sum of the centred rows of earlier batches, in the dtype of the
            result.
        batches: The next vectors in the order visited, some ``(B, D)`` with B >= 1 of
            any float dtype after others.
        mean_D: The centre, the same for all batches of an epoch.

    Returns:
        The new sum, and ``(n,)`` infinity norms and squared 2-norms.
    """
    norms = []
    for rows_BD in batches:
        sums_BD = rows_BD.to(before_D.dtype) - mean_D
        sums_BD[:1] += before_D
        sums_BD = sums_BD.cumsum(0)  # in place it fails on TorchTPU
        infinity = torch.maximum(sums_BD.amax(1), -sums_BD.amin(1))
        norms.append((infinity, squared_norms(sums_BD)))
        before_D = sums_BD[-1].clone()
    infinity, squares = map(torch.cat, zip(*norms))
    return before_D, infinity, squares


@torch.no_grad()
def herding(
    vectors: Tensor,
    order: Tensor | Sequence[int] | None = None,
    mean: Tensor | None = None,
) -> Herding:
    """Returns the largest norm of a prefix sum; NaN if a vector contains a NaN.

    It copies some vectors at a time, all in one program on a lazy device.

    >>> vectors = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> herding(vectors).infinity, herding(vectors, order=[0, 3, 1, 2]).infinity
    (tensor([2.]), tensor([1.5000]))

    Args:
        vectors: ``(n, D)``, n and D >= 1, any dtype and device; sums are in float32 or
            wider.
        order: ``(m,)`` integers in [0, n), m >= 1. Default: 0, 1, ..., n - 1.
        mean: ``(D,)``, what to subtract. Default: the mean of all n vectors, even if
            the order does not contain all of them.

    Raises:
        IndexError: The order does not hold integers, or one is out of range.
        ValueError: A shape is wrong.
    """
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    centre = vectors.mean(0, dtype=dtype) if mean is None else mean.to(dtype)
    order = torch.arange(len(vectors)) if order is None else torch.as_tensor(order)
    if vectors.ndim != 2 or order.ndim != 1 or 0 in (*vectors.shape, *order.shape):
        raise ValueError(
            "herding needs vectors of shape (n, d), both at least 1, in an order (m,), "
            f"got {tuple(vectors.shape)} in {tuple(order.shape)}: flatten all but the "
            "first axis"
        )
    parts = order.to(vectors.device).split(1 + _PIECE // vectors.shape[1])
    rows = (vectors[part] for part in parts)
    _, infinity, squares = prefix_norms(torch.zeros_like(centre), rows, centre)
    return Herding(infinity.amax(0, keepdim=True), squares.amax(0, keepdim=True).sqrt())
