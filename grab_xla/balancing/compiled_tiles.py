"""Balancing on a CPU, four vectors at a time: what Numba compiles.

It imports Numba, so import it where that is installed; `compiled_loop` calls it.
"""

# Numba infers types from values, and reads no hints.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

import numpy as np

from xla_replica.common.compiled_memory import array_at
from xla_replica.common.compiling import compiled


@compiled
def balance_in_tiles(parts, sums, limits, tie_positive, out):
    """Balances vectors that are differences ``x - y``, one after the other.

    Of four vectors it forms the inner products with the accumulator and with one
    another, from which all four signs follow, and then adds the four. So vectors are
    read twice and the accumulator once for four of them.

    Args:
        parts: ``(P, 6)`` int64. Columns may lie in P places: the addresses and the
            steps in bytes of x's rows, the same of y's, the first column and how many.
        sums: ``(1 or 2, D)``: the accumulator, and the plain sum of what is balanced.
        limits: ``(R, 1)``: a vector gets +1 where its product is below.
        tie_positive: Whether it does where they are equal, too.
        out: ``(R,)``: becomes the signs, 0 of vectors that are not finite.
    """
    zero, one = sums.dtype.type(0), sums.dtype.type(1)
    found = np.empty((4, 5), sums.dtype)
    # What the four are multiplied by in the accumulator and in the plain sum.
    signs, used = np.empty(4, sums.dtype), np.empty(4, sums.dtype)
    rows = np.empty(4, np.int64)
    for first in range(0, len(out), 4):
        for i in range(4):
            rows[i] = min(first + i, len(out) - 1)
        found[:] = zero
        for part in parts:
            low, high = part[4], part[4] + part[5]
            _multiply(
                _x(part, rows, sums), _y(part, rows, sums), sums[0, low:high], found
            )
        finite_row = -1
        for i in range(4):
            signs[i] = used[i] = zero
            if first + i >= len(out) or not math.isfinite(found[i, i]):
                continue
            product, limit = found[i, 4], limits[first + i, 0]
            for j in range(i):
                if used[j] != zero:
                    product += signs[j] * found[i, j]
            positive = product < limit or (tie_positive and product == limit)
            signs[i] = one if positive else -one
            used[i] = one
            out[first + i] = 1 if positive else -1
            finite_row = rows[i]
        if finite_row < 0:
            continue
        for i in range(4):
            if used[i] == zero:  # zero times NaN would be NaN
                rows[i] = finite_row
        for part in parts:
            low, high = part[4], part[4] + part[5]
            x, y = _x(part, rows, sums), _y(part, rows, sums)
            if len(sums) > 1:
                _add_to_both(x, y, sums[0, low:high], signs, sums[1, low:high], used)
            else:
                _add(x, y, sums[0, low:high], signs)


@compiled
def _multiply(x, y, total, found):
    """Adds products of four vectors with one another, and last with ``total``."""
    (x0, x1, x2, x3), (y0, y1, y2, y3) = x, y
    p0 = p1 = p2 = p3 = s0 = s1 = s2 = s3 = total.dtype.type(0)
    k10 = k20 = k21 = k30 = k31 = k32 = total.dtype.type(0)
    for j in range(len(total)):
        t = total[j]
        z0, z1, z2, z3 = x0[j] - y0[j], x1[j] - y1[j], x2[j] - y2[j], x3[j] - y3[j]
        p0 += z0 * t
        p1 += z1 * t
        p2 += z2 * t
        p3 += z3 * t
        s0 += z0 * z0
        s1 += z1 * z1
        s2 += z2 * z2
        s3 += z3 * z3
        k10 += z1 * z0
        k20 += z2 * z0
        k21 += z2 * z1
        k30 += z3 * z0
        k31 += z3 * z1
        k32 += z3 * z2
    for i, (product, square) in enumerate(((p0, s0), (p1, s1), (p2, s2), (p3, s3))):
        found[i, 4] += product
        found[i, i] += square
    found[1, 0] += k10
    found[2, 0] += k20
    found[2, 1] += k21
    found[3, 0] += k30
    found[3, 1] += k31
    found[3, 2] += k32


@compiled
def _add(x, y, total, signs):
    (x0, x1, x2, x3), (y0, y1, y2, y3) = x, y
    a0, a1, a2, a3 = signs[0], signs[1], signs[2], signs[3]
    for j in range(len(total)):
        z0, z1, z2, z3 = x0[j] - y0[j], x1[j] - y1[j], x2[j] - y2[j], x3[j] - y3[j]
        total[j] += a0 * z0 + a1 * z1 + a2 * z2 + a3 * z3


@compiled
def _add_to_both(x, y, total, signs, plain, used):
    (x0, x1, x2, x3), (y0, y1, y2, y3) = x, y
    a0, a1, a2, a3 = signs[0], signs[1], signs[2], signs[3]
    b0, b1, b2, b3 = used[0], used[1], used[2], used[3]
    for j in range(len(total)):
        z0, z1, z2, z3 = x0[j] - y0[j], x1[j] - y1[j], x2[j] - y2[j], x3[j] - y3[j]
        plain[j] += b0 * z0 + b1 * z1 + b2 * z2 + b3 * z3
        total[j] += a0 * z0 + a1 * z1 + a2 * z2 + a3 * z3


@compiled
def _x(part, rows, like):
    return _four(part[0], part[1], rows, part[5], like)


@compiled
def _y(part, rows, like):
    return _four(part[2], part[3], rows, part[5], like)


@compiled
def _four(start, step, rows, size, like):
    """Returns four rows of a matrix at an address, in ``like``'s dtype."""
    return (
        array_at(start + rows[0] * step, (size,), like),
        array_at(start + rows[1] * step, (size,), like),
        array_at(start + rows[2] * step, (size,), like),
        array_at(start + rows[3] * step, (size,), like),
    )
