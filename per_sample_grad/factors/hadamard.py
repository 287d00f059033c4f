"""Inner products of outer products of which some are multiplied by a shared matrix.

As each is a product, ``Σ_ij m_ij (u_i z_j) (u'_i z'_j)`` is ``(u u')ᵀ m (z z')``, with
products number by number: one product with m, for all samples together.
"""

from __future__ import annotations

import torch

from per_sample_grad.factors.forms import Hadamard, Outer


def kernel(a: Hadamard, b: Hadamard) -> torch.Tensor:
    """Returns ``⟨a_n, b_n⟩`` by pairs of positions, ``(N, G, T, S)``."""
    mine, theirs = a.products, b.products
    assert isinstance(mine, Outer)
    assert isinstance(theirs, Outer)
    if a.known is not None and a.known is b.known:
        left = mine.left * a.known.lengths
        if theirs.left is mine.left:
            return _inner(left, left)
        return _inner(left, theirs.left * a.known.lengths)
    if _is_one_number(mine.right) and _is_one_number(theirs.right):
        if a.matrix is not b.matrix:
            sums = torch.linalg.vecdot(a.matrix, b.matrix)
        else:  # nothing is written
            sums = torch.linalg.vector_norm(a.matrix, dim=1).square_()
        by_group = sums.view(mine.groups, 1, -1)
        found = _inner(mine.left * by_group, theirs.left)
        return found * (mine.right[..., :1] * theirs.right[..., :1].transpose(2, 3))
    left = _pairs(mine.left, theirs.left)
    groups, _, height = left.shape
    right = _pairs(mine.right, theirs.right)
    through = left @ (a.matrix * b.matrix).view(groups, height, -1)
    return _by_sample(torch.linalg.vecdot(through, right), mine, theirs)


def kernel_with_outer(a: Outer, b: Hadamard) -> torch.Tensor:
    """Returns ``⟨a_n, b_n⟩`` by pairs of positions, ``(N, G, T, S)``."""
    theirs = b.products
    assert isinstance(theirs, Outer)
    if (
        b.known is not None
        and b.known.right is a.right
        and _is_one_number(theirs.right)
    ):
        # Σ_i u_i u'_i (m z)_i, of which m z is known.
        return _inner(a.left * b.known.through, theirs.left)
    left, right = _pairs(a.left, theirs.left), _pairs(a.right, theirs.right)
    through = left @ b.matrix.view(a.groups, left.shape[2], -1)
    return _by_sample(torch.linalg.vecdot(through, right), a, theirs)


def _inner(factor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns inner products of all pairs of positions, ``(N, G, T, S)``."""
    if factor.shape[2] == other.shape[2] == 1:  # in less time than a product's
        return torch.linalg.vecdot(factor, other).unsqueeze(3)
    return factor @ other.transpose(2, 3)


def _is_one_number(factor: torch.Tensor) -> bool:
    """Returns whether a factor was expanded from one number, as far as it tells."""
    sizes = zip(factor.shape, factor.stride())
    return all(size == 1 or stride == 0 for size, stride in sizes)


def _pairs(factor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns products of all pairs of positions, ``(G, N T S, p)``."""
    if factor.shape[2] == other.shape[2] == 1:
        found = factor * other
    else:
        found = (factor.unsqueeze(3) * other.unsqueeze(2)).flatten(2, 3)
    return found.transpose(0, 1).flatten(1, 2)


def _by_sample(found: torch.Tensor, a: Outer, b: Outer) -> torch.Tensor:
    by_position = found.view(a.groups, -1, a.positions, b.positions)
    return by_position.transpose(0, 1)
