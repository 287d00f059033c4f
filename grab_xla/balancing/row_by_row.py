"""Balancing vectors one after the other, which is what a CPU does fastest.

Inner products of all rows of a tile are more of them, and in a tree they are products
with all of its nodes, of which a row passes few.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

# Longer differences are formed in pieces, every time that they are read, so that a step
# of one row, such as a group's, forms no other vector of the model's size.
_PIECE = 2**20


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
        sums: ``(V, D)`` or ``(V + 1, D)``: the accumulators of a tree of ``depth``
            levels below the root, V = 2^(depth + 1) - 1; the row after them is the
            plain sum of what was balanced.
        thresholds, tie: ``(R, depth + 1)`` or None for zeros, and the sign where an
            inner product equals its threshold; see `Decisions`.

    Returns:
        The placements, ``(R,)`` int32, 0 where a row is not finite; see `reorder`.
    """
    others = [None] if subtrahends is None else subtrahends.numpy()
    limits = [[0.0] * (depth + 1)] if thresholds is None else thresholds.tolist()
    parts = [slice(i, i + _PIECE) for i in range(0, sums.shape[1], _PIECE)]
    totals = [[total[part] for part in parts] for total in sums.numpy()]
    placements = []
    rows = zip(minuends.numpy(), itertools.cycle(others), itertools.cycle(limits))
    with np.errstate(all="ignore"):
        for x, y, row_limits in rows:
            pieces = _difference(x, y, parts)
            is_finite = math.isfinite(_dot(pieces(), pieces()))
            placements.append(
                _down_a_tree(pieces, totals, row_limits, tie) if is_finite else 0
            )
    return torch.tensor(placements, dtype=torch.int32)


def _difference(
    x: np.ndarray, y: np.ndarray | None, parts: Sequence[slice]
) -> Callable[[], Iterable[np.ndarray]]:
    """Returns what yields the pieces of x - y."""
    if y is not None and len(parts) > 1:
        return lambda: (x[part] - y[part] for part in parts)
    z = x if y is None else x - y
    formed = [z[part] for part in parts]
    return lambda: formed


def _down_a_tree(
    difference: Callable[[], Iterable[np.ndarray]],
    totals: Sequence[Sequence[np.ndarray]],
    limits: Sequence[float],
    tie: str,
) -> int:
    """Returns the placement of a row, and adds it to the accumulators it passes."""
    node = placement = 0
    for level, limit in enumerate(limits):
        product = _dot(difference(), totals[node])
        positive = product < limit or (tie == "positive" and product == limit)
        _add_(totals[node], difference(), np.add if positive else np.subtract)
        leaf = node - 2**level + 2
        placement = leaf if positive else -leaf
        node = 2 * node + (1 if positive else 2)
    if len(totals) == 2 ** len(limits):
        _add_(totals[-1], difference(), np.add)
    return placement


def _dot(x: Iterable[np.ndarray], y: Iterable[np.ndarray]) -> float:
    return sum(float(a @ b) for a, b in zip(x, y))


def _add_(
    total: Iterable[np.ndarray], pieces: Iterable[np.ndarray], operation: np.ufunc
) -> None:
    for own, piece in zip(total, pieces):
        operation(own, piece, out=own)
