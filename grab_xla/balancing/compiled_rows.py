"""Balancing vectors on a CPU one after the other, in a loop that Numba compiles.

A step of one row, as of a group, is some thirty operations of torch otherwise, and a
tree takes products with all of its nodes, of which a row passes few. This module
imports Numba, so import it where that is installed.
"""

# Numba infers types from values, and reads no hints.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import itertools
import math

import numba
import torch
from torch import Tensor


def balance_rows(
    minuends: Tensor,
    subtrahends: Tensor | None,
    sums: Tensor,
    thresholds: Tensor | None,
    depth: int,
    tie: str,
) -> Tensor:
    """Balances ``minuends - subtrahends`` down a tree of accumulators, row by row.

    It decides as `Decisions.signs` does, and changes the accumulators in place.

    Args:
        minuends, subtrahends: ``(R, D)`` on the CPU, the latter also ``(1, D)`` for
            all; None is zero.
        sums: ``(V, D)`` or ``(V + 1, D)``, contiguous: the accumulators of a tree of
            ``depth`` levels below the root, V = 2^(depth + 1) - 1; the row after them
            is the plain sum of what was balanced.
        thresholds, tie: ``(R, depth + 1)`` or None for zeros, and the sign where an
            inner product equals its threshold; see `Decisions`.

    Returns:
        The placements, ``(R,)`` int32, 0 where a row is not finite; see `reorder`.
    """
    if subtrahends is None:
        subtrahends = torch.zeros_like(minuends[:1])
    if thresholds is None:
        thresholds = sums.new_zeros(len(minuends), depth + 1)
    values = [each.to(sums.dtype) for each in (minuends, subtrahends, thresholds)]
    x, y, limits = (
        (each if each.stride(1) == 1 else each.contiguous()).numpy() for each in values
    )
    placements = torch.empty(len(minuends), dtype=torch.int32)
    walk = sums.numpy(), depth, tie == "positive"
    rows = zip(x, itertools.cycle(y), limits)  # one subtrahend is that of all
    for i, row in enumerate(rows):
        placements[i] = _down_a_tree(*row, *walk)
    return placements


@numba.njit(cache=True)
def _down_a_tree(x, y, limits, sums, depth, tie_positive):
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
