"""Inner products of two samples' gradients, from factors: norms and Gram matrices.

The inner product of two sums of outer products is
``⟨g_i, g_j⟩ = Σ_h Σ_{t,s} (u_{iht} · u'_{jhs}) (z_{iht} · z'_{jhs})``, over groups h
and positions t, s; for one group and position and i = j it is Goodfellow's
``‖u‖² ‖z‖²`` (arXiv:1510.01799). Summed over all ordered pairs of uses it is exact for
parameters used more than once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from per_sample_grad.contributions import (
    Contribution,
    Dense,
    Lookup,
    Outer,
    columns,
    matrix_shape,
)


def has_product(a: Contribution, b: Contribution) -> bool:
    """Whether the pair has an inner product that forms no gradient."""
    match a, b:
        case Dense(), Dense():
            return True
        case Outer(), Outer():
            return a.groups == b.groups
        case Lookup(), Lookup():
            return True
        case (Outer() as outer, Lookup()) | (Lookup(), Outer() as outer):
            return outer.groups == 1
    return False


def squared_norms(
    contributions: Sequence[Contribution], samples_per_chunk: int
) -> torch.Tensor:
    """``‖g_n‖²`` for every n, ``(N,)``, not clamped: rounding may make it negative."""
    total = None
    for i, a in enumerate(contributions):
        for b in contributions[i:]:
            term = _diagonal(a, b, samples_per_chunk)
            term = term if b is a else 2 * term
            total = term if total is None else total + term
    assert total is not None
    return total


def gram(
    left: Sequence[Contribution], right: Sequence[Contribution], samples_per_chunk: int
) -> torch.Tensor:
    """``⟨g_i, g'_j⟩``, shape ``(N, N')``."""
    total = None
    for a in left:
        for b in right:
            term = _pairs(a, b, samples_per_chunk)
            total = term if total is None else total + term
    assert total is not None
    return total


def materialized_squared_norms(
    contributions: Sequence[Contribution], shape: Sequence[int], width: int
) -> torch.Tensor:
    """`squared_norms` from the gradients, ``width`` of their columns at a time."""
    total = None
    for start, stop in _chunks(matrix_shape(shape)[1], width):
        block = _block(contributions, shape, start, stop)
        term = (block * block).sum(1)
        total = term if total is None else total + term
    assert total is not None
    return total


def materialized_gram(
    left: Sequence[Contribution],
    right: Sequence[Contribution],
    shape: Sequence[int],
    width: int,
) -> torch.Tensor:
    """`gram` from the gradients, ``width`` of their columns at a time."""
    total = None
    for start, stop in _chunks(matrix_shape(shape)[1], width):
        a = _block(left, shape, start, stop)
        b = a if left is right else _block(right, shape, start, stop)
        term = a @ b.T
        total = term if total is None else total + term
    assert total is not None
    return total


def _chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, size):
        yield start, min(start + size, total)


def _block(
    contributions: Sequence[Contribution], shape: Sequence[int], start: int, stop: int
) -> torch.Tensor:
    """``(N, r * (stop - start))``: columns of the gradients, all uses summed."""
    total = columns(contributions[0], shape, start, stop)
    for contribution in contributions[1:]:
        total = total + columns(contribution, shape, start, stop)
    return total.flatten(1)


def _diagonal(a: Contribution, b: Contribution, chunk: int) -> torch.Tensor:
    match a, b:
        case Dense(), Dense():
            return (a.values.flatten(1) * b.values.flatten(1)).sum(1)
        case Outer(), Outer() if a.positions == b.positions == 1:
            return ((a.left * b.left).sum(-1) * (a.right * b.right).sum(-1)).sum((1, 2))
        case Lookup(), Outer():
            return _diagonal(b, a, chunk)
    terms = []
    for start, stop in _chunks(_rows(a), chunk):
        part_a, part_b = _part(a, start, stop), _part(b, start, stop)
        match part_a, part_b:
            case Outer(), Outer():
                kernel = part_a.left @ part_b.left.transpose(2, 3)
                kernel = kernel * (part_a.right @ part_b.right.transpose(2, 3))
            case Lookup(), Lookup():
                same = part_a.index.unsqueeze(2) == part_b.index.unsqueeze(1)
                kernel = part_a.values @ part_b.values.transpose(1, 2)
                kernel = torch.where(same, kernel, torch.zeros_like(kernel))
            case Outer(), Lookup():
                left = part_a.left.squeeze(1)  # (n, S, V)
                index = part_b.index.long().unsqueeze(1)
                index = index.expand(-1, left.shape[1], -1)
                kernel = left.gather(2, index)
                right = part_a.right.squeeze(1)
                kernel = kernel * (right @ part_b.values.transpose(1, 2))
            case _:
                raise AssertionError("no factored product; see has_product")
        terms.append(kernel.flatten(1).sum(1))
    return terms[0] if len(terms) == 1 else torch.cat(terms)


def _pairs(a: Contribution, b: Contribution, chunk: int) -> torch.Tensor:
    match a, b:
        case Dense(), Dense():
            return a.values.flatten(1) @ b.values.flatten(1).T
        case Lookup(), Outer():
            return _pairs(b, a, max(1, chunk)).T
    rows = [
        _some_pairs(_part(a, start, stop), b)
        for start, stop in _chunks(_rows(a), chunk)
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _some_pairs(a: Contribution, b: Contribution) -> torch.Tensor:
    """``(n, N')``; forms ``n T N' T'`` products for each group."""
    match a, b:
        case Outer(), Outer():
            kernel = _flat(a.left) @ _flat(b.left).transpose(1, 2)
            kernel = kernel * (_flat(a.right) @ _flat(b.right).transpose(1, 2))
        case Lookup(), Lookup():
            same = a.index.flatten().unsqueeze(1) == b.index.flatten().unsqueeze(0)
            kernel = a.values.flatten(0, 1) @ b.values.flatten(0, 1).T
            kernel = torch.where(same, kernel, torch.zeros_like(kernel)).unsqueeze(0)
        case Outer(), Lookup():
            kernel = _flat(a.left)[0].index_select(1, b.index.flatten().long())
            right = _flat(a.right)[0] @ b.values.flatten(0, 1).T
            kernel = (kernel * right).unsqueeze(0)
        case _:
            raise AssertionError("no factored product; see has_product")
    if a.positions == b.positions == 1:
        return kernel.sum(0)
    shape = (-1, _rows(a), a.positions, _rows(b), b.positions)
    return kernel.reshape(shape).sum((0, 2, 4))


def _flat(factor: torch.Tensor) -> torch.Tensor:
    """From ``(N, G, T, p)`` to ``(G, N T, p)``."""
    return factor.transpose(0, 1).flatten(1, 2)


def _rows(contribution: Contribution) -> int:
    match contribution:
        case Outer(left, _):
            return len(left)
        case Lookup(index, _):
            return len(index)
        case Dense(values):
            return len(values)


def _part(contribution: Contribution, start: int, stop: int) -> Contribution:
    match contribution:
        case Outer(left, right):
            return Outer(left[start:stop], right[start:stop])
        case Lookup(index, values):
            return Lookup(index[start:stop], values[start:stop])
        case Dense(values):
            return Dense(values[start:stop])
