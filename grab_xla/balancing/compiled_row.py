"""Balancing one vector on a CPU, in a loop that Numba compiles.

A group is a step of one row, for which some thirty operations of torch take longer than
the numbers do. This module imports Numba, so import it where that is installed.
"""

# Numba infers types from values, and reads no hints.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

import numba
import torch
from torch import Tensor


def balance_row(
    minuend: Tensor,
    subtrahend: Tensor | None,
    sums: Tensor,
    thresholds: Tensor | None,
    depth: int,
    tie: str,
) -> Tensor:
    """Balances ``minuend - subtrahend`` down a tree of accumulators.

    It decides as `Decisions.signs` does, and changes the accumulators in place.

    Args:
        minuend, subtrahend: ``(1, D)`` on the CPU; None is zero.
        sums: ``(V, D)`` or ``(V + 1, D)``, contiguous: the accumulators of a tree of
            ``depth`` levels below the root, V = 2^(depth + 1) - 1; the row after them
            is the plain sum of what was balanced.
        thresholds, tie: ``(1, depth + 1)`` or None for zeros, and the sign where an
            inner product equals its threshold; see `Decisions`.

    Returns:
        The placement, ``(1,)`` int32, 0 if the row is not finite; see `reorder`.
    """
    if subtrahend is None:
        subtrahend = torch.zeros_like(minuend)
    x, y = (each[0].to(sums.dtype).contiguous() for each in (minuend, subtrahend))
    if thresholds is None:
        thresholds = sums.new_zeros(1, depth + 1)
    limits = thresholds[0].to(sums.dtype).contiguous()
    placement = _down_a_tree(
        x.numpy(), y.numpy(), sums.numpy(), limits.numpy(), depth, tie == "positive"
    )
    return torch.tensor([placement], dtype=torch.int32)


@numba.njit(cache=True)
def _down_a_tree(x, y, sums, limits, depth, tie_positive):
    """Returns the placement of x - y, and adds it to the accumulators it passes."""
    one = sums.dtype.type(1)
    node = placement = 0
    for level in range(depth + 1):
        product, square = _products(x, y, sums[node])
        if not math.isfinite(square):
            return 0
        limit = limits[level]
        positive = product < limit or (tie_positive and product == limit)
        _add(x, y, one if positive else -one, sums[node])
        leaf = node - (2**level - 1)
        placement = leaf + 1 if positive else -(leaf + 1)
        node = 2 * node + (1 if positive else 2)
    if len(sums) == 2 ** (depth + 1):
        _add(x, y, one, sums[-1])
    return placement


# Sums may be formed in any order, so that they vectorise; NaN is preserved.
@numba.njit(fastmath={"reassoc", "contract", "nsz"}, cache=True)
def _products(x, y, total):
    """Returns the inner product of x - y and a vector, and the square of x - y."""
    product = square = total.dtype.type(0)
    for j in range(len(total)):
        z = x[j] - y[j]
        product += z * total[j]
        square += z * z
    return product, square


@numba.njit(cache=True)
def _add(x, y, sign, total):
    """Adds x - y, of this sign, to a vector."""
    for j in range(len(total)):
        total[j] += sign * (x[j] - y[j])
