"""Balancing vectors one after the other, which is what a CPU does fastest.

Inner products of all rows of a step are more of them, and in a tree they are products
with all of its nodes, of which a row passes few.
"""

from __future__ import annotations

import functools
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
    """Does what `Decisions.balance` does of ``minuends - subtrahends`` on a CPU.

    Subtrahends are ``(R, D)``, or ``(1, D)`` for all rows, or None for zero. Placements
    are int32.
    """
    others = [None] if subtrahends is None else subtrahends.numpy()
    limits = [[0.0] * (depth + 1)] if thresholds is None else thresholds.tolist()
    parts = [slice(i, i + _PIECE) for i in range(0, sums.shape[1], _PIECE)]
    totals = [[total[part] for part in parts] for total in sums.numpy()]
    rows = zip(minuends.numpy(), itertools.cycle(others), itertools.cycle(limits))
    with np.errstate(all="ignore"):
        placements = [
            _down_a_tree(_difference(x, y, parts), totals, own, tie)
            for x, y, own in rows
        ]
    return torch.tensor(placements, dtype=torch.int32)


Pieces = Iterable[np.ndarray]


def _difference(
    x: np.ndarray, y: np.ndarray | None, parts: Sequence[slice]
) -> Callable[[], Pieces]:
    """Returns what yields the pieces of x - y."""
    if y is not None and len(parts) > 1:
        return lambda: (x[part] - y[part] for part in parts)
    z = x if y is None else x - y
    return functools.partial(iter, [z[part] for part in parts])


def _down_a_tree(
    difference: Callable[[], Pieces],
    totals: Sequence[Pieces],
    limits: Sequence[float],
    tie: str,
) -> int:
    """Returns the placement of a row, and adds it to the accumulators it passes."""
    if not math.isfinite(sum(map(np.dot, difference(), difference()), 0.0)):
        return 0
    node = placement = 0
    for level, limit in enumerate(limits):
        product = sum(map(np.dot, difference(), totals[node]), 0.0)
        positive = product < limit or (tie == "positive" and product == limit)
        for total, piece in zip(totals[node], difference()):
            (np.add if positive else np.subtract)(total, piece, out=total)
        leaf = node - 2**level + 2
        placement = leaf if positive else -leaf
        node = 2 * node + (1 if positive else 2)
    if len(totals) == 2 ** len(limits):
        for total, piece in zip(totals[-1], difference()):
            np.add(total, piece, out=total)
    return placement
