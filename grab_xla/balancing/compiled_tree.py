"""Balancing on a CPU, one vector at a time down a tree: what Numba compiles.

It imports Numba, so import it where that is installed; `compiled_loop` calls it. All
tensors are given by their addresses, since the call that balances one row has no time
to lose.
"""

# Numba infers types from values, and reads no hints.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

from xla_replica.common.compiled_memory import array_at, integers_at
from xla_replica.common.compiling import compiled


@compiled
def balance_rows(
    x, x_step, y, y_step, out, num_rows,
    num_columns, sums, num_sums, count, limits, depth, tie_positive, like,
):  # fmt: skip
    """Balances rows of x minus rows of y, one after the other.

    Args:
        x, x_step, y, y_step: The first rows, and the bytes from a row to the next one.
        out, num_rows: ``(num_rows,)`` int64: becomes the placements.
        limits: ``(num_rows, depth + 1)``, or 0.
        num_columns, sums, num_sums, count, depth, tie_positive, like: See
            `balance_row`.
    """
    placements = integers_at(out, (num_rows,))
    step = (depth + 1) * like.itemsize if limits else 0
    for i in range(num_rows):
        placements[i] = balance_row(
            x + i * x_step, y + i * y_step, num_columns, sums, num_sums, count,
            limits + i * step, depth, tie_positive, like,
        )  # fmt: skip


@compiled
def balance_row(
    x, y, num_columns, sums, num_sums, count, limits, depth, tie_positive, like
):
    """Balances x minus y, and returns the placement, 0 if that is not finite.

    Args:
        x, y: ``(num_columns,)``.
        num_columns: The numbers of a vector.
        sums, num_sums: ``(num_sums, num_columns)``: the accumulators of the tree, and
            the plain sum of what is balanced, if there is one more.
        count: ``(1,)``: one is added to it unless it is 0 or the vector is not finite.
        limits: ``(depth + 1,)``: the vector gets +1 at a node where its product with
            the accumulator is below. 0: they are zeros.
        depth: The levels of the tree below the root.
        tie_positive: Whether it also does where they are equal.
        like: An array of the dtype of what lies at addresses.
    """
    zero, one = like.dtype.type(0), like.dtype.type(1)
    num_nodes = 2 ** (depth + 1) - 1
    size = num_columns * like.itemsize
    a, b = array_at(x, (num_columns,), like), array_at(y, (num_columns,), like)
    thresholds = array_at(limits, (depth + 1,), like)
    node = placement = 0
    for level in range(depth + 1):
        total = array_at(sums + node * size, (num_columns,), like)
        product = square = zero
        for j in range(len(total)):
            z = a[j] - b[j]
            product += z * total[j]
            square += z * z
        if not math.isfinite(square):
            return 0
        limit = thresholds[level] if limits else zero
        positive = product < limit or (tie_positive and product == limit)
        sign = one if positive else -one
        if level == depth and num_sums > num_nodes:
            plain = array_at(sums + num_nodes * size, (num_columns,), like)
            for j in range(len(total)):
                z = a[j] - b[j]
                total[j] += sign * z
                plain[j] += z
        else:
            for j in range(len(total)):
                total[j] += sign * (a[j] - b[j])
        leaf = node - (2**level - 1)
        placement = leaf + 1 if positive else -(leaf + 1)
        node = 2 * node + (1 if positive else 2)
    if count:
        array_at(count, (1,), like)[0] += one
    return placement
