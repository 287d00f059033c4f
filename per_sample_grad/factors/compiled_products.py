"""Products of rows of numbers on a CPU, by Numba, which they import."""

# Numba infers types from values, and reads no hints.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from xla_replica.common.compiling import compiled

# Numbers of seven rows that stay in a CPU's first cache.
TOGETHER = 1024


@compiled
def sums_with_matrices(lefts, rights, matrix, other, found):
    """Writes ``Σ_ij left_ri m_ij m'_ij right_rj`` to ``found``, ``(R,)``.

    Args:
        lefts, rights: ``(R, p)`` and ``(R, q)``, contiguous.
        matrix, other: ``(p, q)``, contiguous.
        found: See above.
    """
    num_rows, (p, q) = len(lefts), matrix.shape
    products, sums = np.empty((3, q), matrix.dtype), np.empty(12, matrix.dtype)
    totals = np.zeros(num_rows)
    for i in range(0, p, 3):
        height = min(3, p - i)
        for a in range(height):
            row, mine, theirs = products[a], matrix[i + a], other[i + a]
            for j in range(q):
                row[j] = mine[j] * theirs[j]
        # Batches are powers of two more often than multiples of three.
        for n in range(0, num_rows, 4):
            sums[:] = 0
            for first in range(0, q, TOGETHER):
                end = min(first + TOGETHER, q)
                add_products(rights, n, products, 0, first, end, sums, 0)
            for a in range(height):
                for b in range(min(4, num_rows - n)):
                    totals[n + b] += lefts[n + b, i + a] * sums[4 * a + b]
    found[:] = totals


@compiled
def add_products(rows, t, others, s, first, end, found, at):
    """Adds twelve products of four rows and three others, from t and s on.

    A row after the last is the last one. They are of the numbers ``[first, end)``, and
    added to those from ``found[at]`` on, four for each of the others.
    """
    # Slices are made here: one that is handed on is counted, by atomic operations.
    last = len(rows) - 1
    a0, a1 = rows[t, first:end], rows[min(t + 1, last), first:end]
    a2, a3 = rows[min(t + 2, last), first:end], rows[min(t + 3, last), first:end]
    last = len(others) - 1
    b0, b1 = others[s, first:end], others[min(s + 1, last), first:end]
    b2 = others[min(s + 2, last), first:end]
    # As many sums as a CPU has registers for, so that it reads 7 numbers for 12.
    p00 = p01 = p02 = p03 = found.dtype.type(0)
    p10 = p11 = p12 = p13 = found.dtype.type(0)
    p20 = p21 = p22 = p23 = found.dtype.type(0)
    for i in range(len(a0)):
        x, y, z = b0[i], b1[i], b2[i]
        a = a0[i]
        p00 += a * x
        p10 += a * y
        p20 += a * z
        a = a1[i]
        p01 += a * x
        p11 += a * y
        p21 += a * z
        a = a2[i]
        p02 += a * x
        p12 += a * y
        p22 += a * z
        a = a3[i]
        p03 += a * x
        p13 += a * y
        p23 += a * z
    found[at] += p00
    found[at + 1] += p01
    found[at + 2] += p02
    found[at + 3] += p03
    found[at + 4] += p10
    found[at + 5] += p11
    found[at + 6] += p12
    found[at + 7] += p13
    found[at + 8] += p20
    found[at + 9] += p21
    found[at + 10] += p22
    found[at + 11] += p23
