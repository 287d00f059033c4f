"""Balancing on a CPU: one vector after the other, in a loop that Numba compiles.

A CPU gains nothing from inner products of large tiles: another pass through every
gradient is cheaper than multiplying it with its neighbours (docs/benchmarks has the
numbers), except with three of them. The loop decides as `Decisions.signs` does. It is
used where one replica holds all columns and Numba is installed.

What is compiled is in `compiled_tiles` and `compiled_tree`, which import Numba.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancing.rows import SplitRows

DTYPES = (torch.float32, torch.float64)
# They tell Numba the dtype of numbers that it is given by their address.
_LIKE = {dtype: torch.empty(0, dtype=dtype).numpy() for dtype in DTYPES}


def balance_in_sequence(
    minuends: Tensor | SplitRows,
    subtrahends: Tensor | SplitRows,
    sums: Tensor,
    thresholds: Tensor | None,
    depth: int = 0,
    tie: str = "negative",
    count: Tensor | None = None,
) -> Tensor:
    """Balances ``minuend - subtrahend``, row after row, down a tree of accumulators.

    The accumulators change in place, because a tree has more of them than rows. A step
    of one row, as that of a group, is balanced by a single call.

    Args:
        minuends: ``(R, D)`` of `DTYPES` on the CPU; rows may be strided. At depth 0
            their columns may be apart.
        subtrahends: ``(R, D)``, or ``(1, D)`` for all rows.
        sums: ``(V, D)`` or ``(V + 1, D)``, contiguous: the accumulators of a tree of
            ``depth`` levels below the root, V = 2^(depth + 1) - 1; the row after them
            is the plain sum of what was balanced.
        thresholds, tie: ``(R, depth + 1)`` or None for zeros, and the sign where an
            inner product equals its threshold; see `Decisions`.
        count: ``(1,)`` of the dtype of ``sums``, or None: the number of rows that are
            finite is added to it.

    Returns:
        ``(R,)`` integer placements, which may not be changed; see `reorder`.
    """
    num_rows, is_positive = len(minuends), tie == "positive"
    assert sums.is_contiguous()
    x, y = _parts(minuends, sums.dtype), _parts(subtrahends, sums.dtype)
    if thresholds is not None:
        thresholds = thresholds.to(sums.dtype).contiguous()
    like = _LIKE[sums.dtype]
    if len(x) == 1 and (depth or num_rows == 1):
        rest = (
            sums.shape[1], sums.data_ptr(), len(sums), _address(count),
            _address(thresholds), depth, is_positive, like,
        )  # fmt: skip
        if num_rows == 1:
            balance_row = _compiled("tree").balance_row
            return _placed(balance_row(x[0].data_ptr(), y[0].data_ptr(), *rest))
        placed = torch.zeros(num_rows, dtype=torch.int64)
        rows = *_place(x[0]), *_place(y[0]), placed.data_ptr(), num_rows
        _compiled("tree").balance_rows(*rows, *rest)
        return placed
    placements = np.zeros(num_rows, dtype=np.int32)
    if num_rows:
        if len(y) < len(x):
            y = list(y[0].split([part.shape[1] for part in x], 1))
        places, first = [], 0
        for pair in zip(x, y, strict=True):
            width = pair[0].shape[1]
            places.append([*_place(pair[0]), *_place(pair[1]), first, width])
            first += width
        addresses = np.array(places, dtype=np.int64)
        limits = np.zeros((num_rows, 1), like.dtype)
        if thresholds is not None:
            limits = thresholds.numpy()
        _compiled("tiles").balance_in_tiles(
            addresses, sums.numpy(), limits, is_positive, placements
        )
    if count is not None:
        count += np.count_nonzero(placements)
    return torch.from_numpy(placements)


def _parts(rows: Tensor | SplitRows, dtype: torch.dtype) -> list[Tensor]:
    """Returns the parts of rows, each with its columns side by side."""
    if isinstance(rows, Tensor) and rows.dtype == dtype and rows.is_contiguous():
        return [rows]
    parts = [rows] if isinstance(rows, Tensor) else rows.parts
    parts = [part.to(dtype) for part in parts]
    return [x if x.shape[1] < 2 or x.stride(1) == 1 else x.contiguous() for x in parts]


def _place(rows: Tensor) -> tuple[int, int]:
    """Returns the address of the first row and the bytes to the next one."""
    step = 0 if len(rows) == 1 else rows.stride(0) * rows.itemsize
    return rows.data_ptr(), step


def _address(tensor: Tensor | None) -> int:
    """Returns the address of the first number, 0 of None."""
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _placed(placement: int) -> Tensor:
    """Returns the placement of one row, ``(1,)``, in a small dtype."""
    dtype = torch.int8 if abs(placement) < 128 else torch.int32
    return torch.tensor([placement], dtype=dtype)


@functools.cache
def _compiled(name: str) -> Any:
    """Returns the module of compiled loops, which imports Numba."""
    return importlib.import_module(f"grab_xla.balancing.compiled_{name}")
