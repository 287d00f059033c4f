"""Projections of single layers on a CPU, one sample after the other, by Numba.

It imports Numba, so import it where that is installed. torch multiplies as many small
matrices as there are samples, for which it needs several times as long as for reading
the gradients, and has to be given patches of all samples. Each of the small operations
around that waits for its code, too, since the pass has filled the caches. Here a sample
is projected while it is in the cache, to where its numbers belong.

Each function writes projections of weights and biases to columns of ``out`` ``(B, k)``.
Where is in ``places``: the first column and how many, of either; 0 are for nobody. A
`Fold` is a tuple here: the signs of n numbers, ones if all stay, and how many are kept.
"""

# Numba infers types from values, and reads no hints.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from xla_replica.common.compiling import compiled

# Positions whose numbers of four rows stay in a CPU's first cache.
_TOGETHER = 1024


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
    """Writes ``channel[first + position * stride]`` where that is inside."""
    sizes, step = channel.shape, strides[2]
    low = max(0, -(first[2] // step))
    high = min(positions[2], (sizes[2] - 1 - first[2]) // step + 1)
    at = 0
    for a in range(positions[0]):
        for b in range(positions[1]):
            x, y = first[0] + a * strides[0], first[1] + b * strides[1]
            if 0 <= x < sizes[0] and 0 <= y < sizes[1]:
                line = channel[x, y]
                if step == 1:
                    for t in range(low, high):
                        patch[at + t] = line[first[2] + t]
                else:
                    for t in range(low, high):
                        patch[at + t] = line[first[2] + t * step]
            at += positions[2]


@compiled
def _multiply(seen, starts, gradient, found):
    """Writes products of rows, four of the gradient's at a time.

    The others begin at ``starts`` in ``seen``.
    """
    found[:] = 0
    last, num_positions = len(gradient) - 1, gradient.shape[1]
    for begin in range(0, num_positions, _TOGETHER):
        end = min(begin + _TOGETHER, num_positions)
        for j in range(0, last + 1, 4):
            j1, j2, j3 = min(j + 1, last), min(j + 2, last), min(j + 3, last)
            d0, d1 = gradient[j, begin:end], gradient[j1, begin:end]
            d2, d3 = gradient[j2, begin:end], gradient[j3, begin:end]
            for k in range(len(starts)):
                patch = seen[starts[k] + begin : starts[k] + end]
                s0 = s1 = s2 = s3 = found.dtype.type(0)
                for t in range(len(patch)):
                    s0 += d0[t] * patch[t]
                    s1 += d1[t] * patch[t]
                    s2 += d2[t] * patch[t]
                    s3 += d3[t] * patch[t]
                found[k, j] += s0
                if j1 > j:
                    found[k, j1] += s1
                if j2 > j1:
                    found[k, j2] += s2
                if j3 > j2:
                    found[k, j3] += s3


@compiled
def _fold(values, fold, into):
    """Writes the sums of numbers, with their signs, that share a place."""
    signs, kept = fold
    into[:] = 0
    for first in range(0, len(values), kept):
        for t in range(min(kept, len(values) - first)):
            into[t] += signs[first + t] * values[first + t]


@compiled
def _fold_matrix(products, num_columns, rows, columns, by_column, into):
    """Writes the sums of products ``(K, p)`` that share a place."""
    (signs, k1), (column_signs, k2) = rows, columns
    to_row, to_column = (1, k1) if by_column else (k2, 1)
    into[:] = 0
    for k in range(num_columns):
        sign, start = column_signs[k], k % k2 * to_column
        for j in range(products.shape[1]):
            into[start + j % k1 * to_row] += sign * signs[j] * products[k, j]


@compiled
def _multiply_outer(left, right, into):
    """Writes an outer product, row after row."""
    num = len(right)
    for j in range(len(left)):
        for t in range(num):
            into[j * num + t] = left[j] * right[t]
