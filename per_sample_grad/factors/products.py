"""Inner products of two samples' gradients, from factors: norms and Gram matrices.

The inner product of two sums of outer products is
``⟨g_i, g_j⟩ = Σ_h Σ_{t,s} (u_{iht} · u'_{jhs}) (z_{iht} · z'_{jhs})``, over groups h
and positions t, s; for one group and position and i = j it is Goodfellow's
``‖u‖² ‖z‖²`` (arXiv:1510.01799). Summed over all ordered pairs of uses it is exact for
parameters used more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from per_sample_grad.factors.algebra import columns, summed
from per_sample_grad.factors.forms import (
    LAZY,
    Contribution,
    Dense,
    Lookup,
    Outer,
    Windows,
    chunks,
    matrix_shape,
    num_rows,
    part,
)


def has_product(a: Contribution, b: Contribution) -> bool:
    """Whether the pair has an inner product that forms no gradient."""
    match a, b:
        case Dense(), Dense():
            return True
        case (Outer() | Windows(), Outer() | Windows()):
            return a.groups == b.groups
        case Lookup(), Lookup():
            return True
        case (Outer() | Windows() as outer, Lookup()) | (
            Lookup(),
            Outer() | Windows() as outer,
        ):
            return outer.groups == 1
    return False


def squared_norms(contributions: Sequence[Contribution], samples: int) -> torch.Tensor:
    """``‖g_n‖²`` for every n, ``(N,)``, not clamped: rounding may make it negative."""

    def of_some(start: int, stop: int) -> torch.Tensor:
        parts = [part(each, start, stop) for each in contributions]
        terms = [
            _diagonal(a, b) if a is b else 2 * _diagonal(a, b)
            for i, a in enumerate(parts)
            for b in parts[i:]
        ]
        return summed(terms)

    return _side_by_side(of_some, num_rows(contributions[0]), samples)


def gram(
    left: Sequence[Contribution], right: Sequence[Contribution], samples: int
) -> torch.Tensor:
    """``⟨g_i, g'_j⟩``, shape ``(N, N')``, of so many samples of each at a time."""
    same = left is right

    def of_some(start: int, stop: int) -> torch.Tensor:
        a = [part(each, start, stop) for each in left]

        def with_some(low: int, high: int) -> torch.Tensor:
            if same and (low, high) == (start, stop):
                b = a
            else:
                b = [part(each, low, high) for each in right]
            return summed([_pairs(one, other) for one in a for other in b])

        return _side_by_side(with_some, num_rows(right[0]), samples, dim=1)

    return _side_by_side(of_some, num_rows(left[0]), samples)


def materialized_squared_norms(
    contributions: Sequence[Contribution],
    shape: Sequence[int],
    samples: int,
    width: int,
) -> torch.Tensor:
    """`squared_norms` from the gradients, so many samples and columns at a time."""

    def of_some(start: int, stop: int) -> torch.Tensor:
        return summed(
            _squares(_block(contributions, shape, (start, stop), first, last))
            for first, last in chunks(matrix_shape(shape)[1], width)
        )

    return _side_by_side(of_some, num_rows(contributions[0]), samples)


def materialized_gram(
    left: Sequence[Contribution],
    right: Sequence[Contribution],
    shape: Sequence[int],
    samples: int,
    width: int,
) -> torch.Tensor:
    """`gram` from the gradients, ``width`` columns at a time of all samples.

    Args:
        left: Merged uses in a batch.
        right: In the same or another one.
        shape: Of the parameter.
        samples: Whose uses are unfolded at a time.
        width: Columns.
    """
    total = None
    for first, last in chunks(matrix_shape(shape)[1], width):
        a = gradients(left, shape, samples, first, last).flatten(1)
        b = a
        if left is not right:
            b = gradients(right, shape, samples, first, last).flatten(1)
        term = a @ b.T
        total = term if total is None else total + term
        del a, b  # before the next ones are made
    assert total is not None
    return total


def gradients(
    contributions: Sequence[Contribution],
    shape: Sequence[int],
    samples: int,
    first: int,
    last: int,
) -> torch.Tensor:
    """``(N, r, last - first)``: columns of every sample's gradient, uses summed."""
    total = num_rows(contributions[0])
    if samples >= total:
        return _block(contributions, shape, (0, total), first, last)
    found: torch.Tensor | None = None
    for start, stop in chunks(total, samples):
        block = _block(contributions, shape, (start, stop), first, last)
        if found is None:
            found = block.new_empty(total, *block.shape[1:])
        # In its place: pieces that are joined later are there twice.
        found[start:stop] = block
    assert found is not None
    return found


def _block(
    contributions: Sequence[Contribution],
    shape: Sequence[int],
    samples: tuple[int, int],
    first: int,
    last: int,
) -> torch.Tensor:
    return summed(columns(each, shape, first, last, samples) for each in contributions)


def _squares(block: torch.Tensor) -> torch.Tensor:
    """``(N,)``: the sum of squares, without a tensor of squares."""
    flat = block.flatten(1)
    if flat.device.type in LAZY:
        return (flat * flat).sum(1)  # a compiler makes one loop of it
    return torch.linalg.vector_norm(flat, dim=1).square()


def _diagonal(a: Outer | Lookup | Dense, b: Outer | Lookup | Dense) -> torch.Tensor:
    """``⟨a_n, b_n⟩``: ``(N,)``."""
    match a, b:
        case Dense(), Dense():
            if a is b:
                return _squares(a.values)
            return (a.values.flatten(1) * b.values.flatten(1)).sum(1)
        case Outer(), Outer() if a.positions == b.positions == 1:
            if a is b and a.groups == 1:
                return _squares(a.left) * _squares(a.right)
            return ((a.left * b.left).sum(-1) * (a.right * b.right).sum(-1)).sum((1, 2))
        case Lookup(), Outer():
            return _diagonal(b, a)
        case Outer(), Outer():
            kernel = a.left @ b.left.transpose(2, 3)
            kernel = kernel * (a.right @ b.right.transpose(2, 3))
        case Lookup(), Lookup():
            same = a.index.unsqueeze(2) == b.index.unsqueeze(1)
            kernel = a.values @ b.values.transpose(1, 2)
            kernel = torch.where(same, kernel, torch.zeros_like(kernel))
        case Outer(), Lookup():
            left = a.left.squeeze(1)  # (n, S, V)
            index = b.index.long().unsqueeze(1)
            index = index.expand(-1, left.shape[1], -1)
            kernel = left.gather(2, index)
            right = a.right.squeeze(1)
            kernel = kernel * (right @ b.values.transpose(1, 2))
        case _:
            raise AssertionError("no factored product; see has_product")
    return kernel.flatten(1).sum(1)


def _pairs(a: Outer | Lookup | Dense, b: Outer | Lookup | Dense) -> torch.Tensor:
    """``(n, n')``; forms ``n T n' T'`` products for each group."""
    match a, b:
        case Dense(), Dense():
            return a.values.flatten(1) @ b.values.flatten(1).T
        case Lookup(), Outer():
            return _pairs(b, a).T
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
    shape = (-1, num_rows(a), a.positions, num_rows(b), b.positions)
    return kernel.reshape(shape).sum((0, 2, 4))


def _flat(factor: torch.Tensor) -> torch.Tensor:
    """From ``(N, G, T, p)`` to ``(G, N T, p)``."""
    return factor.transpose(0, 1).flatten(1, 2)


def _side_by_side(
    of_some: Callable[[int, int], torch.Tensor], total: int, size: int, dim: int = 0
) -> torch.Tensor:
    """What a function says of chunks of samples, side by side."""
    found = [of_some(start, stop) for start, stop in chunks(total, size)]
    return found[0] if len(found) == 1 else torch.cat(found, dim)
