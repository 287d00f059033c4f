"""Balancing on a CPU: one vector after the other, in a loop that Numba compiles.

A CPU gains nothing from inner products of large tiles: another pass through every
gradient is cheaper than multiplying it with its neighbours (docs/benchmarks has the
numbers), except with three of them. The loop decides as `Decisions.signs` does. It is
used where one replica holds all columns and Numba is installed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancing.rows import SplitRows
from xla_replica.common.compiling import compiled

DTYPES = (torch.float32, torch.float64)
Rows = tuple[np.ndarray, int]  # Contiguous rows, and the step between those in use.


def balance_in_sequence(
    minuends: Tensor | SplitRows,
    subtrahends: Tensor | SplitRows,
    sums: Tensor,
    thresholds: Tensor | None,
    depth: int = 0,
    tie: str = "negative",
) -> Tensor:
    """Balances ``minuend - subtrahend``, row after row, down a tree of accumulators.

    The accumulators change in place, because a tree has more of them than rows.

    Args:
        minuends: ``(R, D)`` of `DTYPES` on the CPU; rows may be strided. At depth 0
            their columns may be apart.
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
    limits = np.zeros((num_rows, depth + 1))
    if thresholds is not None:
        limits = np.ascontiguousarray(thresholds.numpy())
    limits = limits.astype(sums.numpy().dtype, copy=False)
    is_positive = tie == "positive"
    if num_rows and depth:
        assert isinstance(minuends, Tensor)
        assert isinstance(subtrahends, Tensor)
        x, y = _rows(minuends), _rows(subtrahends)
        _compiled(_tree)(x, y, sums.numpy(), limits, depth, is_positive, placements)
    elif num_rows:
        from grab_xla.balancing.compiled_tiles import balance_in_tiles

        x, y = (_parts(each, sums.dtype) for each in (minuends, subtrahends))
        if len(y) < len(x):
            y = y[0].split([part.shape[1] for part in x], 1)
        places, first = [], 0
        for pair in zip(x, y, strict=True):
            width = pair[0].shape[1]
            places.append([*_place(pair[0]), *_place(pair[1]), first, width])
            first += width
        addresses = np.array(places, dtype=np.int64)
        balance_in_tiles(addresses, sums.numpy(), limits, is_positive, placements)
    return torch.from_numpy(placements)


def _parts(rows: Tensor | SplitRows, dtype: torch.dtype) -> list[Tensor]:
    """Returns the parts of rows, each with its columns side by side."""
    parts = [rows] if isinstance(rows, Tensor) else rows.parts
    parts = [part.to(dtype) for part in parts]
    return [x if x.shape[1] < 2 or x.stride(1) == 1 else x.contiguous() for x in parts]


def _place(rows: Tensor) -> tuple[int, int]:
    """Returns the address of the first row and the bytes to the next one."""
    step = 0 if len(rows) == 1 else rows.stride(0) * rows.itemsize
    return rows.data_ptr(), step


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
    return compiled(loop)
