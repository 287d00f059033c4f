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

DTYPES = (torch.float32, torch.float64)


def available() -> bool:
    """Returns whether Numba is installed."""
    return importlib.util.find_spec("numba") is not None


def balance_in_sequence(
    minuends: torch.Tensor,
    subtrahends: torch.Tensor,
    sums: torch.Tensor,
    thresholds: torch.Tensor | None,
    *,
    depth: int = 0,
    tie_positive: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Balances ``minuend - subtrahend``, row after row, down a tree of accumulators.

    Args:
        minuends: ``(R, D)`` float32 or float64 on the CPU; rows may be strided.
        subtrahends: ``(R, D)``, or ``(1, D)`` for all rows.
        sums: ``(V, D)`` or ``(V + 1, D)``: the accumulators of a tree of ``depth``
            levels below the root, V = 2^(depth + 1) - 1; the row after them is the
            plain sum of what was balanced.
        thresholds: ``(R, depth + 1)`` or None for zeros; see `Decisions`.
        tie_positive: The sign where an inner product equals its threshold.

    Returns:
        The new sums, and ``(R,)`` int32 placements; see `reorder`.
    """
    num_rows = len(minuends)
    sums = sums.clone(memory_format=torch.contiguous_format)
    placements = np.zeros(num_rows, dtype=np.int32)
    if thresholds is None:
        thresholds = torch.zeros(1, 1, dtype=sums.dtype).expand(num_rows, depth + 1)
    if num_rows:
        loop = _compiled(_chain if depth == 0 else _tree)
        loop(
            *_rows(minuends),
            *_rows(subtrahends),
            sums.numpy(),
            np.ascontiguousarray(thresholds.numpy()),
            depth,
            tie_positive,
            placements,
        )
    return sums, torch.from_numpy(placements)


def _rows(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
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
    x: Any,
    x_step: int,
    y: Any,
    y_step: int,
    sums: Any,
    thresholds: Any,
    depth: int,
    tie_positive: bool,
    placements: Any,
) -> None:
    """Does what `_tree` of depth 0 does, in one pass over memory for each row.

    The pass that adds a row to the accumulator also forms the accumulator's inner
    product with the following row.
    """
    num_rows, num_columns = len(placements), sums.shape[1]
    zero = sums.dtype.type(0)
    one = sums.dtype.type(1)
    total, plain = sums[0], sums[-1]
    keeps_plain = len(sums) > 1 + depth
    product = square = zero
    for j in range(num_columns):
        z = x[0, j] - y[0, j]
        product += z * total[j]
        square += z * z
    for i in range(num_rows):
        a, b = x[i * x_step], y[i * y_step]
        following = min(i + 1, num_rows - 1)
        c, d = x[following * x_step], y[following * y_step]
        finite = math.isfinite(square)
        limit = thresholds[i, 0]
        positive = product < limit or (tie_positive and product == limit)
        sign = one if positive else -one
        product = square = zero
        if not finite:
            for j in range(num_columns):
                z = c[j] - d[j]
                product += z * total[j]
                square += z * z
            continue
        placements[i] = 1 if positive else -1
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
    x: Any,
    x_step: int,
    y: Any,
    y_step: int,
    sums: Any,
    thresholds: Any,
    depth: int,
    tie_positive: bool,
    placements: Any,
) -> None:
    """Balances rows of x minus rows of y into ``sums``."""
    num_columns = sums.shape[1]
    num_nodes = 2 ** (depth + 1) - 1
    one = sums.dtype.type(1)
    for i in range(len(placements)):
        a, b = x[i * x_step], y[i * y_step]
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
            limit = thresholds[i, level]
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
            placements[i] = leaf + 1 if positive else -(leaf + 1)
            node = 2 * node + (1 if positive else 2)


@functools.cache
def _compiled(loop: Callable[..., None]) -> Callable[..., None]:
    import numba

    # Sums may be formed in any order, so that they vectorise; NaN is preserved.
    return numba.njit(fastmath={"reassoc", "contract", "nsz"}, cache=True)(loop)
