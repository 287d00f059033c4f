"""Projections of layers on a CPU, one sample after the other, by Numba.

It imports Numba, so import it where that is installed. torch multiplies as many small
matrices as there are samples, for which it needs several times as long as for reading
the gradients, and has to be given patches of all samples. Each of the small operations
around that waits for its code, too, since the pass has filled the caches. Here a sample
is projected while it is in the cache, to where its numbers belong, and many layers are
one call, whose arguments are a matrix of integers.

Each function writes projections of weights and biases to columns of ``out`` ``(B, k)``.
Where is in ``places``: the first column and how many, of either; 0 are for nobody. A
`Fold` is a tuple here: the signs of n numbers, ones if all stay, and how many are kept.
"""

# Numba infers types from values, and reads no hints.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from xla_replica.common.compiled_memory import array_at, integers_at
from xla_replica.common.compiling import compiled

# The kinds of calls, and what a row of `project_calls` has in its columns: the kind,
# the addresses of four tensors, two places, three folds (address of the signs, how many
# there are, how many are kept), whether numbers of different rows are next to one
# another, the signs of channels or the matrix of the side that is folded first (address
# and sizes), and up to 18 sizes.
CONVOLUTION, LINEAR, POSITIONS, GROUP_NORM, LAYER_NORM, EMBEDDING = range(6)
_PLACES, _ROWS, _COLUMNS, _BIAS, _BY_COLUMN, _MATRIX, _SIZES = 5, 9, 12, 15, 18, 19, 22
WIDTH = _SIZES + 18
# Positions whose numbers of four rows stay in a CPU's first cache.
_TOGETHER = 1024
# Sums that are formed beside one another, in a few vectors of a CPU.
_AT_ONCE = 64


@compiled
def project_calls(calls, out):
    """Writes the projections of several calls, each a row of int64; see `WIDTH`."""
    for row in calls:
        inputs, gradients, num = row[1], row[2], len(out)
        places = ((row[5], row[6]), (row[7], row[8]))
        rows, columns = _fold_at(row, _ROWS, out), _fold_at(row, _COLUMNS, out)
        of_bias, by_column = _fold_at(row, _BIAS, out), row[_BY_COLUMN] > 0
        matrix, sizes = row[_MATRIX : _MATRIX + 3], row[_SIZES:]
        (p, q), num_positions = (rows[0].size, columns[0].size), sizes[0]
        if row[0] == CONVOLUTION:
            positions = _three(sizes, 3)
            project_convolution(
                array_at(inputs, (num, matrix[1], *_three(sizes, 0)), out),
                array_at(
                    gradients, (num, p, positions[0] * positions[1] * positions[2]), out
                ),
                (
                    _three(sizes, 6), _three(sizes, 9), _three(sizes, 12),
                    _three(sizes, 15), positions,
                ),
                array_at(matrix[0], (matrix[1],), out),
                rows, columns, by_column, of_bias, out, places,
            )  # fmt: skip
        elif row[0] == LINEAR:
            project_linear(
                array_at(inputs, (num, q), out), array_at(gradients, (num, p), out),
                rows, columns, by_column, of_bias, out, places,
            )  # fmt: skip
        elif row[0] == POSITIONS:
            left = array_at(gradients, (num, num_positions, p), out)
            right = array_at(inputs, (num, num_positions, q), out)
            signs = array_at(matrix[0], (matrix[1], matrix[2]), out)
            if by_column:
                project_positions(right, left, signs, rows, of_bias, True, out, places)
            else:
                project_positions(
                    left, right, signs, columns, of_bias, False, out, places
                )
        elif row[0] == EMBEDDING:
            project_embedding(
                integers_at(inputs, (num, num_positions)),
                array_at(gradients, (num, num_positions, matrix[2]), out),
                sizes[1], rows, array_at(matrix[0], (matrix[1], matrix[2]), out),
                by_column, out, places,
            )  # fmt: skip
        elif row[0] == GROUP_NORM:
            shape = (num, sizes[2], num_positions)
            project_group_norm(
                array_at(inputs, shape, out), array_at(gradients, shape, out),
                array_at(row[3], (num, sizes[1]), out),
                array_at(row[4], (num, sizes[1]), out),
                rows, of_bias, out, places,
            )  # fmt: skip
        else:
            shape = (num, num_positions, sizes[2])
            project_layer_norm(
                array_at(inputs, shape, out), array_at(gradients, shape, out),
                array_at(row[3], (num, num_positions), out),
                array_at(row[4], (num, num_positions), out),
                rows, of_bias, out, places,
            )  # fmt: skip


@compiled
def _fold_at(row, first, like):
    """Returns the fold that three columns of a row describe."""
    return array_at(row[first], (row[first + 1],), like), row[first + 2]


@compiled
def _three(sizes, first):
    return sizes[first], sizes[first + 1], sizes[first + 2]


@compiled
def project_convolution(
    inputs,
    gradients,
    geometry,
    channels,
    rows,
    columns,
    by_column,
    of_bias,
    out,
    places,
):
    """Projects what a convolution without groups adds, with zeros as padding.

    Args:
        inputs: ``(B, C, A, B, W)``, contiguous.
        gradients: ``(B, p, P)``, contiguous.
        geometry: Five times three integers, one for each spatial dimension: the sizes
            of the kernel, K their product; strides; dilations; how many zeros are
            before the input; positions, P their product.
        channels: ``(C,)``, the signs with which channels are added up to one.
        rows, columns, by_column: The folds of p and of K, and whether numbers of
            different rows, and not columns, are next to one another.
        of_bias: The fold of p numbers of the bias.
        out, places: What becomes the projections.
    """
    (to_weights, of_weights), (to_biases, of_biases) = places
    kernel, strides, dilations, before, positions = geometry
    channel = np.empty(inputs.shape[2:], out.dtype)
    num_offsets = kernel[0] * kernel[1] * kernel[2]
    num_positions, num_lines = gradients.shape[2], positions[1]
    # What neighbouring rows of the kernel see of an image are the same lines, from
    # another one on.
    is_shared = kernel[0] == positions[0] == strides[1] == 1 and before[0] == 0
    if is_shared:
        num_lines += dilations[1] * (kernel[1] - 1)
    size = positions[0] * num_lines * positions[2]
    num_rows = num_offsets + (of_biases > 0)
    starts = np.empty(num_rows, np.int64)
    # Zeros stay where a kernel sees what is outside, and ones at the end.
    seen = np.zeros((num_offsets + 1) * max(size, num_positions), out.dtype)
    starts[num_offsets:] = len(seen) - num_positions
    seen[len(seen) - num_positions :] = 1
    products = np.empty((num_rows, gradients.shape[1]), out.dtype)
    extent = (positions[0], num_lines, positions[2])
    for i in range(len(inputs)):
        _add_up(inputs[i], channels, channel)
        row = 0
        for a in range(kernel[0]):
            for b in range(kernel[1]):
                for w in range(kernel[2]):
                    first = (
                        a * dilations[0] - before[0],
                        b * dilations[1] - before[1],
                        w * dilations[2] - before[2],
                    )
                    if is_shared:
                        starts[row] = w * size + b * dilations[1] * positions[2]
                    else:
                        starts[row] = row * size
                    if b == 0 or not is_shared:
                        start = starts[row]
                        part = seen[start : start + size]
                        _shift(channel, first, strides, extent, part)
                    row += 1
        _multiply(seen, starts, gradients[i], products)
        _fold_matrix(
            products, num_offsets, rows, columns, by_column,
            out[i, to_weights : to_weights + of_weights],
        )  # fmt: skip
        if of_biases:
            _fold(
                products[num_offsets],
                of_bias,
                out[i, to_biases : to_biases + of_biases],
            )


@compiled
def project_linear(inputs, gradients, rows, columns, by_column, of_bias, out, places):
    """Projects what a linear layer adds that has one position in a sample.

    The arguments are those of `project_convolution`; ``inputs`` are ``(B, q)`` and
    ``gradients`` ``(B, p)``.
    """
    (to_weights, of_weights), (to_biases, of_biases) = places
    left = np.empty(rows[1], out.dtype)
    right = np.empty(columns[1], out.dtype)
    for i in range(len(inputs)):
        _fold(gradients[i], rows, left)
        _fold(inputs[i], columns, right)
        if of_biases:
            _fold(gradients[i], of_bias, out[i, to_biases : to_biases + of_biases])
        if by_column:
            _multiply_outer(right, left, out[i, to_weights : to_weights + of_weights])
        else:
            _multiply_outer(left, right, out[i, to_weights : to_weights + of_weights])


@compiled
def project_positions(sides, others, matrix, rest, of_bias, bias_of_other, out, places):
    """Projects what a linear layer adds that has several positions in a sample.

    Args:
        sides: ``(B, T, n)``, contiguous: that of inputs and gradients of which fewer
            numbers stay.
        others: ``(B, T, m)``, contiguous.
        matrix: ``(k, n)``, which folds the former.
        rest: The fold of m numbers.
        of_bias, bias_of_other: The fold of the bias, and whether the gradients that it
            sums are ``others``.
        out, places: What becomes the projections.
    """
    (to_weights, of_weights), (to_biases, of_biases) = places
    num_kept, num_positions = len(matrix), sides.shape[1]
    width = of_weights // num_kept
    # A row of ones sums the gradients of a bias.
    few = np.ones((num_kept + 1, num_positions), out.dtype)
    num_sums = num_kept + (bias_of_other and of_biases > 0)
    sums = np.empty((num_sums, others.shape[2]), out.dtype)
    total = np.empty(sides.shape[2], out.dtype)
    for i in range(len(sides)):
        for t in range(num_positions):
            for j in range(num_kept):
                few[j, t] = _product(matrix[j], sides[i, t])
        _add_products(few, others[i], sums)
        for j in range(num_kept):
            start = to_weights + j * width
            _fold(sums[j], rest, out[i, start : start + width])
        if of_biases:
            into = out[i, to_biases : to_biases + of_biases]
            if bias_of_other:
                _fold(sums[num_kept], of_bias, into)
            else:
                total[:] = 0
                for t in range(num_positions):
                    for j in range(len(total)):
                        total[j] += sides[i, t, j]
                _fold(total, of_bias, into)


@compiled
def project_embedding(
    indices, gradients, padding, rows, matrix, by_column, out, places
):
    """Projects what an embedding adds to the rows that were looked up.

    Args:
        indices: ``(B, T)`` int64, contiguous.
        gradients: ``(B, T, q)``, contiguous.
        padding: The row that takes no gradient; -1: none.
        rows: The fold of the table's rows.
        matrix: ``(k2, q)``, which folds the columns.
        by_column: Whether numbers of different rows are next to one another.
        out, places: What becomes the projections.
    """
    (to_weights, of_weights), _ = places
    signs, kept = rows
    num_columns = len(matrix)
    to_row, to_column = (1, kept) if by_column else (num_columns, 1)
    for i in range(len(indices)):
        into = out[i, to_weights : to_weights + of_weights]
        into[:] = 0
        for t in range(indices.shape[1]):
            index = indices[i, t]
            if index == padding:
                continue
            if index < 0 or index >= len(signs):
                raise IndexError("an embedding's input was changed after it was used")
            start = index % kept * to_row
            for j in range(num_columns):
                product = _product(matrix[j], gradients[i, t])
                into[start + j * to_column] += signs[index] * product


@compiled
def project_layer_norm(inputs, gradients, mean, scale, of_weight, of_bias, out, places):
    """Projects what a LayerNorm over one dimension adds.

    Args:
        inputs, gradients: ``(B, T, q)``, contiguous.
        mean, scale: ``(B, T)``: the mean of each position, and 1 / its deviation.
        of_weight, of_bias: Folds of q numbers.
        out, places: What becomes the projections.
    """
    (to_weights, of_weights), (to_biases, of_biases) = places
    sums = np.empty((2, inputs.shape[2]), out.dtype)
    for i in range(len(inputs)):
        sums[:] = 0
        of_product, total = sums[0], sums[1]
        for t in range(inputs.shape[1]):
            x, delta = inputs[i, t], gradients[i, t]
            factor, centre = scale[i, t], mean[i, t]
            for j in range(len(x)):
                of_product[j] += (x[j] - centre) * factor * delta[j]
                total[j] += delta[j]
        if of_weights:
            _fold(of_product, of_weight, out[i, to_weights : to_weights + of_weights])
        if of_biases:
            _fold(total, of_bias, out[i, to_biases : to_biases + of_biases])


@compiled
def project_group_norm(inputs, gradients, mean, scale, of_weight, of_bias, out, places):
    """Projects what a GroupNorm adds.

    Args:
        inputs, gradients: ``(B, C, T)``, contiguous.
        mean, scale: ``(B, G)``: the mean of each group, and 1 / its deviation.
        of_weight, of_bias: Folds of C numbers.
        out, places: What becomes the projections.
    """
    (to_weights, of_weights), (to_biases, of_biases) = places
    num_channels = inputs.shape[1]
    size = num_channels // mean.shape[1]
    sums = np.empty((2, num_channels), gradients.dtype)
    for i in range(len(inputs)):
        for c in range(num_channels):
            x, delta = inputs[i, c], gradients[i, c]
            product = total = sums.dtype.type(0)
            for t in range(len(x)):
                product += x[t] * delta[t]
                total += delta[t]
            group = c // size
            sums[0, c] = (product - mean[i, group] * total) * scale[i, group]
            sums[1, c] = total
        if of_weights:
            _fold(sums[0], of_weight, out[i, to_weights : to_weights + of_weights])
        if of_biases:
            _fold(sums[1], of_bias, out[i, to_biases : to_biases + of_biases])


@compiled
def _product(left, right):
    total = left.dtype.type(0)
    for j in range(len(left)):
        total += left[j] * right[j]
    return total


@compiled
def _add_products(few, others, sums):
    """Writes products ``(k, T) @ (T, m)``, four positions at a time."""
    sums[:] = 0
    num_positions, whole = len(others), len(others) // 4 * 4
    for t in range(0, whole, 4):
        x0, x1, x2, x3 = others[t], others[t + 1], others[t + 2], others[t + 3]
        for j in range(len(sums)):
            f0, f1, f2, f3 = few[j, t], few[j, t + 1], few[j, t + 2], few[j, t + 3]
            total = sums[j]
            for c in range(len(total)):
                total[c] += f0 * x0[c] + f1 * x1[c] + f2 * x2[c] + f3 * x3[c]
    for t in range(whole, num_positions):
        for j in range(len(sums)):
            factor, total, x = few[j, t], sums[j], others[t]
            for c in range(len(total)):
                total[c] += factor * x[c]


@compiled
def _add_up(channels, signs, total):
    """Writes the signed sum of channels ``(C, A, B, W)`` to ``total``."""
    into = total.reshape(-1)
    into[:] = 0
    for c in range(len(channels)):
        sign, values = signs[c], channels[c].reshape(-1)
        for t in range(len(into)):
            into[t] += sign * values[t]


@compiled
def _shift(channel, first, strides, positions, patch):
    """Writes ``channel[first + position * stride]`` where that is inside.

    Elsewhere in ``patch`` there are zeros, and stay.
    """
    sizes, step, width = channel.shape, strides[2], positions[2]
    low = max(0, -(first[2] // step))
    high = min(width, (sizes[2] - 1 - first[2]) // step + 1)
    # Lines that are shifted and no shorter follow one another, as all of an image.
    together = step == strides[1] == 1 and width == sizes[2]
    values, at = channel.reshape(-1), 0
    for a in range(positions[0]):
        x = first[0] + a * strides[0]
        if x < 0 or x >= sizes[0]:
            at += positions[1] * width
        elif together:
            begin = max(0, -first[1])
            end = min(positions[1], sizes[1] - first[1])
            if end > begin and high > low:
                source = (x * sizes[1] + first[1]) * width + first[2]
                # Slices: an index that may be negative is looked at before it is used.
                since, until = begin * width + low, end * width - width + high
                seen = values[source + since : source + until]
                into = patch[at + since : at + until]
                for t in range(len(seen)):
                    into[t] = seen[t]
                for t in range(width):
                    if t < low or t >= high:
                        into = patch[at + begin * width + t : at + end * width : width]
                        for b in range(len(into)):
                            into[b] = 0
            at += positions[1] * width
        else:
            for b in range(positions[1]):
                y = first[1] + b * strides[1]
                if 0 <= y < sizes[1]:
                    line = channel[x, y]
                    for t in range(low, high):
                        patch[at + t] = line[first[2] + t * step]
                at += width


@compiled
def _multiply(seen, starts, gradient, found):
    """Writes products of rows: four of the gradient's with two others at a time.

    The others begin at ``starts`` in ``seen``.
    """
    found[:] = 0
    last, last_start = len(gradient) - 1, len(starts) - 1
    num_positions, zero = gradient.shape[1], found.dtype.type(0)
    for begin in range(0, num_positions, _TOGETHER):
        end = min(begin + _TOGETHER, num_positions)
        for j in range(0, last + 1, 4):
            j1, j2, j3 = min(j + 1, last), min(j + 2, last), min(j + 3, last)
            d0, d1 = gradient[j, begin:end], gradient[j1, begin:end]
            d2, d3 = gradient[j2, begin:end], gradient[j3, begin:end]
            for k in range(0, last_start + 1, 2):
                k1 = min(k + 1, last_start)
                x = seen[starts[k] + begin : starts[k] + end]
                y = seen[starts[k1] + begin : starts[k1] + end]
                s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = zero
                for t in range(len(x)):
                    s0 += d0[t] * x[t]
                    s1 += d1[t] * x[t]
                    s2 += d2[t] * x[t]
                    s3 += d3[t] * x[t]
                    t0 += d0[t] * y[t]
                    t1 += d1[t] * y[t]
                    t2 += d2[t] * y[t]
                    t3 += d3[t] * y[t]
                _add_four(found[k], j, last, s0, s1, s2, s3)
                if k1 > k:
                    _add_four(found[k1], j, last, t0, t1, t2, t3)


@compiled
def _add_four(into, first, last, s0, s1, s2, s3):
    """Adds four numbers, or as many as there are up to ``last``."""
    into[first] += s0
    if first + 1 <= last:
        into[first + 1] += s1
    if first + 2 <= last:
        into[first + 2] += s2
    if first + 3 <= last:
        into[first + 3] += s3


@compiled
def _fold(values, fold, into):
    """Writes the sums of numbers, with their signs, that share a place."""
    signs, kept = fold
    into[:] = 0
    # A few sums would each wait for the one before; more of them make a vector.
    times = min(_AT_ONCE, len(values)) // kept
    if times < 2:
        _fold_to(values, signs, kept, into)
        return
    more = np.zeros(times * kept, into.dtype)
    _fold_to(values, signs, times * kept, more)
    for first in range(0, times * kept, kept):
        some = more[first : first + kept]
        for t in range(kept):
            into[t] += some[t]


@compiled
def _fold_to(values, signs, kept, into):
    for first in range(0, len(values), kept):
        some, own = values[first : first + kept], signs[first : first + kept]
        for t in range(len(some)):
            into[t] += own[t] * some[t]


@compiled
def _fold_matrix(products, num_columns, rows, columns, by_column, into):
    """Writes the sums of products ``(K, p)`` that share a place."""
    (signs, k1), (column_signs, k2) = rows, columns
    to_row, to_column = (1, k1) if by_column else (k2, 1)
    into[:] = 0
    num_rows = products.shape[1]
    for k in range(num_columns):
        sign, start = column_signs[k], k % k2 * to_column
        for first in range(0, num_rows, k1):  # faster than remainders
            some, own = products[k, first : first + k1], signs[first : first + k1]
            for j in range(len(some)):
                into[start + j * to_row] += sign * own[j] * some[j]


@compiled
def _multiply_outer(left, right, into):
    """Writes an outer product, row after row."""
    num = len(right)
    for j in range(len(left)):
        factor, row = left[j], into[j * num : (j + 1) * num]
        for t in range(num):
            row[t] = factor * right[t]
