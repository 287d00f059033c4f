"""Norms of single layers on a CPU, one sample after the other, by Numba.

It imports Numba, so import it where that is installed. torch forms products of all
samples and reads them again for their norms; it multiplies both halves of symmetric
matrices, and knows no faster way to a convolution's gradient than every product. Here
what is formed of a sample is used while it is in the first caches.
"""

# Numba infers types from values, and reads no hints.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from per_sample_grad.factors.compiled_products import TOGETHER, add_products
from xla_replica.common.compiling import compiled

# A vector of a CPU has no more numbers.
_VECTOR = 16


@compiled
def square_sums_of_products(lefts, rights, ones, squares, terms):
    """Writes squared norms of ``Σ_t u_t z_tᵀ`` from ``⟨u_t, u_s⟩ (⟨z_t, z_s⟩ + ones)``.

    Products of t and s are those of s and t, and are formed once.

    Args:
        lefts, rights: ``(B, T, p)`` and ``(B, T, q)``, contiguous.
        ones: How many columns of ones z has besides: a bias is one.
        squares: Becomes the squared norms ``(B,)``.
        terms: Becomes what positions add alone, ``(B,)``.
    """
    num_positions, p, q = lefts.shape[1], lefts.shape[2], rights.shape[2]
    of_left, of_right = np.empty(12, squares.dtype), np.empty(12, squares.dtype)
    for n in range(len(lefts)):
        left, right = lefts[n], rights[n]
        both = alone = squares.dtype.type(0)
        for t in range(0, num_positions, 4):
            for s in range(0, min(t + 4, num_positions), 3):
                of_left[:] = 0
                of_right[:] = ones
                for first in range(0, p, TOGETHER):
                    end = min(first + TOGETHER, p)
                    add_products(left, t, left, s, first, end, of_left, 0)
                for first in range(0, q, TOGETHER):
                    end = min(first + TOGETHER, q)
                    add_products(right, t, right, s, first, end, of_right, 0)
                for b in range(3):
                    for a in range(min(4, num_positions - t)):
                        product = of_left[4 * b + a] * of_right[4 * b + a]
                        if t + a > s + b:
                            both += product
                        elif t + a == s + b:
                            alone += product
        squares[n], terms[n] = alone + both + both, alone


@compiled
def square_sums_of_convolution(inputs, gradients, before, with_bias, squares):
    """Writes squared norms of what a convolution adds whose kernel is 3 by 3.

    Two by two positions see four by four numbers. Their nine sums of four products need
    sixteen products of sums, minimal filtering (Winograd 1980; Lavin & Gray,
    arXiv:1509.09308) with δ as the filter: with 1 for `_two` of a pair of δ and `_four`
    of four x, ``g_w = δ_0 x_w + δ_1 x_{w+1}`` is `_three` of their products.

    Args:
        inputs: ``(B, C, H, W)``, contiguous.
        gradients: ``(B, p, P, Q)``, contiguous; P is at least ``H + before[0] - 2``,
            and Q is likewise.
        before: How many zeros are above and left of the input.
        with_bias: Whether to add the squared norms of a bias, too.
        squares: Becomes the squared norms, ``(B,)``.
    """
    num_samples, channels, width = len(inputs), inputs.shape[1], inputs.shape[3]
    p, tall, wide = gradients.shape[1:]
    dtype = squares.dtype
    num_rows, pitch = (tall + 1) // 2, 2 * ((wide + 1) // 2) + 2
    # Numbers of one of the 16 products; the last pair of each row is of nothing.
    size = -(-num_rows * pitch // (2 * _VECTOR)) * _VECTOR
    # Lines, with zeros around them, and the four sums of some of them. What is right of
    # a line is left of the next one.
    seen_lines = np.zeros((2 * num_rows + 2, width), dtype)
    lines = np.zeros((2 * num_rows, wide), dtype)
    seen_sums = np.zeros((4, 2 * size + 2 + before[1]), dtype)
    sums = np.zeros((4, 2 * size + 2), dtype)
    to_seen = _matrices(seen_sums, before[1], num_rows, pitch)
    to_sums = _matrices(sums, 0, num_rows, pitch)
    seen_lines_inside = seen_lines.reshape(-1)[before[0] * width :]
    all_lines = lines.reshape(-1)
    seen = np.empty((16, channels, size), dtype)
    found = np.zeros((16, 4, size), dtype)
    products = np.empty((16, -(-channels // 3) * 12), dtype)
    for n in range(num_samples):
        for c in range(channels):
            _copy(inputs[n, c], seen_lines_inside)
            _add_lines_of_four(seen_lines, *to_seen)
            for a in range(4):
                _add_columns_of_four(seen_sums[a], seen, 4 * a, c)
        total = dtype.type(0)
        for j in range(0, p, 4):
            found[:, p - j :] = 0  # rows of a channel that is not there
            for row in range(min(4, p - j)):
                _copy(gradients[n, j + row], all_lines)
                _add_lines_of_two(lines, *to_sums)
                for a in range(4):
                    _add_columns_of_two(sums[a], found, 4 * a, row)
                if with_bias:
                    of_bias, pairs = dtype.type(0), found[5, row]  # sums of all four
                    for t in range(size):
                        of_bias += pairs[t]
                    total += of_bias * of_bias
            products[:] = 0
            for k in range(16):
                four, others, into = found[k], seen[k], products[k]
                for c in range(0, channels, 3):
                    add_products(four, 0, others, c, 0, size, into, 4 * c)
            total += _squares(products, 4 * channels)
        squares[n] = total


@compiled
def add_up_layer_norm(inputs, gradients, mean, scale, of_weight, of_bias):
    """Writes the gradients of a LayerNorm's weight and bias.

    Args:
        inputs, gradients: ``(B, T, q)``, contiguous.
        mean, scale: ``(B, T)``: the mean of each row, and 1 / its deviation.
        of_weight, of_bias: Become the gradients, ``(B, q)``.
    """
    for n in range(len(inputs)):
        weight, bias = of_weight[n], of_bias[n]
        weight[:] = 0
        bias[:] = 0
        for t in range(inputs.shape[1]):
            x, delta, m, r = inputs[n, t], gradients[n, t], mean[n, t], scale[n, t]
            for i in range(len(weight)):
                weight[i] += (x[i] - m) * r * delta[i]
                bias[i] += delta[i]


@compiled
def square_sums_of_table(index, values, num_rows, squares):
    """Writes squared norms of tables to which each sample adds some rows.

    Args:
        index: ``(B, T)``, the rows, contiguous.
        values: ``(B, T, q)``, what is added, contiguous.
        num_rows: How many rows the table has.
        squares: Becomes the squared norms, ``(B,)``.
    """
    place = np.full(num_rows, -1, np.int64)
    table = np.empty(values.shape[1:], values.dtype)
    for n in range(len(index)):
        count = 0
        for t in range(index.shape[1]):
            at, value = place[index[n, t]], values[n, t]
            if at < 0:
                place[index[n, t]] = count
                row = table[count]
                count += 1
                for i in range(len(row)):
                    row[i] = value[i]
            else:
                row = table[at]
                for i in range(len(row)):
                    row[i] += value[i]
        for t in range(index.shape[1]):
            place[index[n, t]] = -1
        total = squares.dtype.type(0)
        for number in table[:count].reshape(-1):
            total += number * number
        squares[n] = total


@compiled
def _matrices(sums, first, num_rows, pitch):
    """Returns views of four vectors as matrices."""
    end = first + num_rows * pitch
    shape = (num_rows, pitch)
    return (
        sums[0, first:end].reshape(shape),
        sums[1, first:end].reshape(shape),
        sums[2, first:end].reshape(shape),
        sums[3, first:end].reshape(shape),
    )


@compiled
def _copy(values, into):
    flat = values.reshape(-1)
    for i in range(len(flat)):
        into[i] = flat[i]


# Loops that write to one or two places are vectorised; those that write to more would
# need too many checks of whether places overlap.


@compiled
def _add_lines_of_four(lines, s0, s1, s2, s3):
    """Writes the sums `_four` of four lines, from every other one on."""
    for i in range(len(s0)):
        for t in range(lines.shape[1]):
            s0[i, t] = lines[2 * i, t] - lines[2 * i + 2, t]
        for t in range(lines.shape[1]):
            s1[i, t] = lines[2 * i + 1, t] + lines[2 * i + 2, t]
            s2[i, t] = lines[2 * i + 2, t] - lines[2 * i + 1, t]
        for t in range(lines.shape[1]):
            s3[i, t] = lines[2 * i + 1, t] - lines[2 * i + 3, t]


@compiled
def _add_columns_of_four(values, found, k, row):
    """Writes the sums `_four` of four numbers, from every other one on."""
    s0, s1, s2, s3 = (
        found[k, row],
        found[k + 1, row],
        found[k + 2, row],
        found[k + 3, row],
    )
    for t in range(len(s0)):
        x0, x1, x2, x3 = (
            values[2 * t],
            values[2 * t + 1],
            values[2 * t + 2],
            values[2 * t + 3],
        )
        s0[t] = x0 - x2
        s1[t] = x1 + x2
        s2[t] = x2 - x1
        s3[t] = x1 - x3


@compiled
def _add_lines_of_two(lines, s0, s1, s2, s3):
    """Writes the sums `_two` of every pair of lines."""
    for i in range(len(s0)):
        for t in range(lines.shape[1]):
            s0[i, t] = lines[2 * i, t]
            s3[i, t] = lines[2 * i + 1, t]
        for t in range(lines.shape[1]):
            s1[i, t] = lines[2 * i, t] + lines[2 * i + 1, t]
            s2[i, t] = lines[2 * i, t] - lines[2 * i + 1, t]


@compiled
def _add_columns_of_two(values, found, k, row):
    """Writes the sums `_two` of every pair of numbers."""
    s0, s1, s2, s3 = (
        found[k, row],
        found[k + 1, row],
        found[k + 2, row],
        found[k + 3, row],
    )
    for t in range(len(s0)):
        s0[t] = values[2 * t]
        s3[t] = values[2 * t + 1]
    for t in range(len(s0)):
        s1[t] = s0[t] + s3[t]
        s2[t] = s0[t] - s3[t]


@compiled
def _three(m0, m1, m2, m3, half):
    """Returns three sums of two products each from four products of sums."""
    both = (m1 + m2) * half
    return m0 + both, (m1 - m2) * half, both - m3


@compiled
def _squares(products, count):
    """Returns the sum of the squares of nine numbers for each 16 of the products."""
    total, half = products.dtype.type(0), products.dtype.type(0.5)
    p = products
    for k in range(count):
        a0, a1, a2 = _three(p[0, k], p[4, k], p[8, k], p[12, k], half)
        b0, b1, b2 = _three(p[1, k], p[5, k], p[9, k], p[13, k], half)
        c0, c1, c2 = _three(p[2, k], p[6, k], p[10, k], p[14, k], half)
        d0, d1, d2 = _three(p[3, k], p[7, k], p[11, k], p[15, k], half)
        x, y, z = _three(a0, b0, c0, d0, half)
        total += x * x + y * y + z * z
        x, y, z = _three(a1, b1, c1, d1, half)
        total += x * x + y * y + z * z
        x, y, z = _three(a2, b2, c2, d2, half)
        total += x * x + y * y + z * z
    return total
