"""The linear algebra on contributions that forms no gradient, or some columns of one.

Axes and forms are those of `contributions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from per_sample_grad.factors.forms import (
    Contribution,
    Dense,
    Lookup,
    Outer,
    Windows,
    chunks,
    dtype_of,
    matrix_shape,
    num_rows,
    part,
    unfolded_elements,
)


def summed(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of one or more tensors, one after the other."""
    total = None
    for term in terms:
        total = term if total is None else total + term
    assert total is not None
    return total


def samples_within(contribution: Contribution, budget: int) -> int:
    """Samples at a time whose unfolded factors have no more than ``budget`` bytes."""
    total = num_rows(contribution)
    each = unfolded_elements(contribution) * dtype_of(contribution).itemsize
    return max(1, min(total, budget // each)) if each else max(1, total)


def parts(
    contribution: Contribution, budget: int
) -> Iterator[tuple[int, int, Outer | Lookup | Dense]]:
    """Start, stop and samples: chunks that fit the budget when unfolded."""
    total = num_rows(contribution)
    for start, stop in chunks(total, samples_within(contribution, budget)):
        yield start, stop, part(contribution, start, stop)


def columns(
    contribution: Contribution,
    shape: Sequence[int],
    start: int,
    stop: int,
    samples: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Columns ``[start, stop)`` of every sample's gradient: ``(N, r, stop - start)``.

    Costs ``2 N G T p (stop - start)`` flops: chunks together cost what the whole does.
    Of `Windows`, ``start`` and ``stop`` are multiples of K.
    """
    rows, all_columns = matrix_shape(shape)
    low, high = samples or (0, num_rows(contribution))
    match contribution:
        case Outer(left, right):
            block = left[low:high].transpose(2, 3) @ right[low:high, ..., start:stop]
            return block.flatten(1, 2)
        case Windows():
            return contribution.gradients(low, high, start, stop)
        case Lookup(index, values):
            index, values = index[low:high], values[low:high]
            num, width = len(index), stop - start
            first_row = torch.arange(num, device=index.device).unsqueeze(1) * rows
            table = values.new_zeros(num * rows, width)
            table.index_add_(
                0,
                (index.long() + first_row).flatten(),
                values[..., start:stop].reshape(-1, width),
            )
            return table.unflatten(0, (num, rows))
        case Dense(values):
            matrix = values[low:high].reshape(high - low, rows, all_columns)
            return matrix[..., start:stop]


def dot(contribution: Contribution, vector: torch.Tensor, budget: int) -> torch.Tensor:
    """``⟨v, g_n⟩`` for every n: ``(N,)``. ``vector`` has the parameter's shape.

    For outer products ``Σ_t u_tᵀ V z_t``: one product with V, no T² term, no gradient.
    """
    found = [_dot(some, vector) for _, _, some in parts(contribution, budget)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _dot(contribution: Outer | Lookup | Dense, vector: torch.Tensor) -> torch.Tensor:
    matrix = vector.reshape(matrix_shape(vector.shape))
    match contribution:
        case Outer(left, right):
            by_group = matrix.unflatten(0, (left.shape[1], left.shape[3]))
            # From the shorter side: (N, G, T, p or q).
            if left.shape[3] <= right.shape[3]:
                product = right @ by_group.transpose(1, 2)
                return (product * left).sum((1, 2, 3))
            return ((left @ by_group) * right).sum((1, 2, 3))
        case Lookup(index, values):
            rows = matrix.index_select(0, index.flatten().long()).view_as(values)
            return (rows * values).sum((1, 2))
        case Dense(values):
            return values.flatten(1) @ vector.flatten()


def weighted_sum(
    contribution: Contribution,
    shape: Sequence[int],
    weights: torch.Tensor,
    budget: int,
) -> torch.Tensor:
    """``Σ_n w_n g_n``, of the parameter's shape: the cost of a batch gradient."""
    total: torch.Tensor | None = None
    for start, stop, some in parts(contribution, budget):
        term = _weighted_sum(some, shape, weights[start:stop])
        total = term if total is None else total + term
    assert total is not None
    return total


def _weighted_sum(
    contribution: Outer | Lookup | Dense, shape: Sequence[int], weights: torch.Tensor
) -> torch.Tensor:
    match contribution:
        case Outer(left, right):
            scaled = left * weights[:, None, None, None]
            p, q = left.shape[3], right.shape[3]
            alike = left.shape[1] == 1 and left.is_contiguous()
            if not alike and p * q <= left.shape[2] * (p + q):
                # Forming gradients writes less than bringing positions together.
                return (scaled.transpose(2, 3) @ right).sum(0).reshape(shape)
            by_group = scaled.transpose(0, 1).flatten(1, 2).transpose(1, 2)
            return (by_group @ right.transpose(0, 1).flatten(1, 2)).reshape(shape)
        case Lookup(index, values):
            rows, width = matrix_shape(shape)
            scaled = (values * weights[:, None, None]).reshape(-1, width)
            table = values.new_zeros(rows, width)
            return table.index_add(0, index.flatten().long(), scaled).reshape(shape)
        case Dense(values):
            return (weights @ values.flatten(1)).reshape(shape)
