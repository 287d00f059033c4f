"""Balancing on a CPU: one vector after the other, in a loop that Numba compiles.

A CPU gains nothing from inner products of whole tiles: another pass through every
gradient is cheaper than multiplying it with its neighbours (docs/benchmarks has the
numbers). The loop decides as `Decisions.signs` does. It is used where one replica holds
all columns and Numba is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64)
Rows = tuple[np.ndarray, int]  # Contiguous rows, and the step between those in use.


def available() -> bool:
    """Returns whether Numba is installed."""
    return importlib.util.find_spec("numba") is not None


def balance_in_sequence(
    minuends: Tensor,
    subtrahends: Tensor,
    sums: Tensor,
    thresholds: Tensor | None,
    depth: int = 0,
    tie: str = "negative",
) -> Tensor:
    """Balances ``minuend - subtrahend``, row after row, down a tree of accumulators.

    The accumulators change in place, because a tree has more of them than rows.

    Args:
        minuends: ``(R, D)`` of `DTYPES` on the CPU; rows may be strided.
        subtrahends: ``(R, D)``, or ``(1, D)`` for all rows.
        sums: ``(V, D)`` or ``(V + 1, D)``: the accumulators of a tree of ``depth``
            levels below the root, V = 2^(depth + 1) - 1; the row after them is the
            plain sum of what was balanced.
        thresholds, tie: ``(R, depth + 1)`` or None for zeros, and the sign where an
            inner product equals its threshold; see `Decisions`.

    Returns:
        ``(R,)`` int32 placements; see `reorder`.
    """
    num_rows = len(minuends)
    placements = np.zeros(num_rows, dtype=np.int32)
    if thresholds is None:
        thresholds = torch.zeros(1, 1, dtype=sums.dtype).expand(num_rows, depth + 1)
    if num_rows:
        loop = _compiled(_chain if depth == 0 else _tree)
        limits = np.ascontiguousarray(thresholds.numpy())
        x, y = _rows(minuends), _rows(subtrahends)
        loop(x, y, sums.numpy(), limits, depth, tie == "positive", placements)
    return torch.from_numpy(placements)


def _rows(tensor: Tensor) -> Rows:
    """Returns the tensor's memory as contiguous rows, and the step between its rows.

    A view of every other row is not copied: pairs are differences of such views.
    """
    num_columns = tensor.shape[1]
    if len(tensor) == 1:
        return tensor.contiguous().numpy(), 0
    step, rest = divmod(tensor.stride(0), max(num_columns, 1))
    if rest or step < 1 or (num_columns > 1 and tensor.stride(1) != 1):
        return tensor.contiguous().numpy(), 1
    shape = ((len(tensor) - 1) * step + 1, num_columns)
    return tensor.as_strided(shape, (num_columns, 1)).numpy(), step


def _chain(
    x: Rows, y: Rows, sums: Any, limits: Any, depth: int, tie_positive: bool, out: Any
) -> None:
    """Does what `_tree` of depth 0 does, in one pass over memory for each row.

    The pass that adds a row also forms the inner product with the following row.
    """
    (minuends, x_step), (subtrahends, y_step) = x, y
    num_rows, num_columns = len(out), sums.shape[1]
    zero, one = sums.dtype.type(0), sums.dtype.type(1)
    total, plain = sums[0], sums[-1]
    keeps_plain = len(sums) > 1 + depth
    product = square = zero
    for j in range(num_columns):
        z = minuends[0, j] - subtrahends[0, j]
        product += z * total[j]
        square += z * z
    for i in range(num_rows):
        a, b = minuends[i * x_step], subtrahends[i * y_step]
        following = min(i + 1, num_rows - 1)
        c, d = minuends[following * x_step], subtrahends[following * y_step]
        finite = math.isfinite(square)
        limit = limits[i, 0]
        positive = product < limit or (tie_positive and product == limit)
        sign = one if positive else -one
        product = square = zero
        if not finite:
            for j in range(num_columns):
                z = c[j] - d[j]
                product += z * total[j]
                square += z * z
            continue
        out[i] = 1 if positive else -1
        if keeps_plain:
            for j in range(num_columns):
                z = a[j] - b[j]
                plain[j] += z
                new = total[j] + sign * z
                total[j] = new
                z = c[j] - d[j]
                product += z * new
                square += z * z
        else:
            for j in range(num_columns):
                new = total[j] + sign * (a[j] - b[j])
                total[j] = new
                z = c[j] - d[j]
                product += z * new
                square += z * z


def _tree(
    x: Rows, y: Rows, sums: Any, limits: Any, depth: int, tie_positive: bool, out: Any
) -> None:
    """Balances rows of x minus rows of y into ``sums``."""
    (minuends, x_step), (subtrahends, y_step) = x, y
    num_columns = sums.shape[1]
    num_nodes = 2 ** (depth + 1) - 1
    one = sums.dtype.type(1)
    for i in range(len(out)):
        a, b = minuends[i * x_step], subtrahends[i * y_step]
        node = 0
        for level in range(depth + 1):
            total = sums[node]
            product = square = one - one
            for j in range(num_columns):
                z = a[j] - b[j]
                product += z * total[j]
                square += z * z
            if not math.isfinite(square):
                break
            limit = limits[i, level]
            positive = product < limit or (tie_positive and product == limit)
            sign = one if positive else -one
            if level == depth and len(sums) > num_nodes:
                plain = sums[num_nodes]
                for j in range(num_columns):
                    z = a[j] - b[j]
                    total[j] += sign * z
                    plain[j] += z
            else:
                for j in range(num_columns):
                    total[j] += sign * (a[j] - b[j])
            leaf = node - (2**level - 1)
            out[i] = leaf + 1 if positive else -(leaf + 1)
            node = 2 * node + (1 if positive else 2)


@functools.cache
def _compiled(loop: Callable[..., None]) -> Callable[..., None]:
    import numba

    # Sums may be formed in any order, so that they vectorise; NaN is preserved.
    return numba.njit(fastmath={"reassoc", "contract", "nsz"}, cache=True)(loop)
