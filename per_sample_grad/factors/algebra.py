"""Linear algebra on contributions: products, norms and Gram matrices of gradients.

Most of it forms no gradient. The inner product of two sums of outer products is
``⟨g_i, g_j⟩ = Σ_h Σ_{t,s} (u_{iht} · u'_{jhs}) (z_{iht} · z'_{jhs})``, over groups h
and positions t, s; for one group and position and i = j it is Goodfellow's
``‖u‖² ‖z‖²`` (arXiv:1510.01799). Summed over all ordered pairs of uses it is exact for
parameters that are used more than once.

Axes are those of `forms`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import (
    Contribution,
    Dense,
    Lookup,
    Outer,
    Part,
    Windows,
)


def dot(contribution: Contribution, vectors: torch.Tensor, budget: int) -> torch.Tensor:
    """Returns ``⟨v, g_n⟩`` for every n and v, ``(N, K)``, of ``(K, *shape)`` vectors.

    For outer products that is ``Σ_t u_tᵀ V z_t``: one product with V.
    """
    found = [_dots(some, vectors) for _, _, some in _parts(contribution, budget)]
    return torch.cat(found)


def _dots(contribution: Part, vectors: torch.Tensor) -> torch.Tensor:
    rows, columns = forms.matrix_shape(vectors.shape[1:])
    vectors = vectors.to(forms.float_factor(contribution).dtype)
    matrices = vectors.reshape(len(vectors), rows, columns)
    match contribution:
        case Dense(values):
            return values.flatten(1) @ matrices.flatten(1).T
        case Lookup(index, values):
            flat = index.flatten().long()
            products = [m.index_select(0, flat).view_as(values) for m in matrices]
            return torch.stack([(p * values).sum((1, 2)) for p in products], 1)
        case Outer(left, right):
            matrices = matrices.unflatten(1, (left.shape[1], -1))
            one, other = _flat(right), _flat(left)
            if left.shape[3] > right.shape[3]:  # from the shorter side
                one, other, matrices = other, one, matrices.transpose(2, 3)
            by_sample = (left.shape[0], left.shape[2])
            products = [(one @ m.transpose(1, 2)) * other for m in matrices]
            # (G, N T, p or q)
            terms = [each.unflatten(1, by_sample).sum((0, 2, 3)) for each in products]
            return torch.stack(terms, 1)


def add_weighted_sums_(
    totals: torch.Tensor, contribution: Contribution, weights: torch.Tensor, budget: int
) -> None:
    """Adds ``Σ_n w_kn g_n`` to ``(K, *shape)``, in place, for K weightings.

    That costs as much as K gradients of a batch. A sample without a weight but zero
    adds nothing, even if it is not finite.
    """
    by_matrix = (len(totals), *forms.matrix_shape(totals.shape[1:]))
    weights, has_weight = weights.to(totals.dtype), (weights != 0).any(0)
    for start, stop, some in _parts(contribution, budget):
        own, kept = weights[:, start:stop], has_weight[start:stop]
        some = forms.mapped(some, functools.partial(_only, kept, totals.dtype))
        match some:
            case Outer(left, right):
                by_position = own.repeat_interleave(left.shape[2], 1)[:, None, :, None]
                scaled = (_flat(left) * by_position).transpose(2, 3)
                totals.view(by_matrix).add_((scaled @ _flat(right)).flatten(1, 2))
            case Lookup(index, values):
                scaled = (values * own[:, :, None, None]).flatten(1, 2)
                totals.view(by_matrix).index_add_(1, index.flatten().long(), scaled)
            case Dense(values):
                totals.view(len(totals), -1).addmm_(own, values.flatten(1))


def _only(kept: torch.Tensor, dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """Returns zeros for the samples that are not ``kept``, ``(N,)`` bool."""
    kept = kept.view(-1, *[1] * (values.dim() - 1))
    return torch.where(kept, values, torch.zeros_like(values)).to(dtype)


def _parts(contribution: Contribution, budget: int) -> Iterator[tuple[int, int, Part]]:
    """Yields start, stop and samples whose unfolded factors fit ``budget`` bytes."""
    rows = size = forms.num_rows(contribution)
    if isinstance(contribution, Windows):
        each = forms.unfolded(contribution) * contribution.width
        size = max(1, budget // (each * contribution.left.itemsize))
    for start, stop in forms.chunks(rows, size):
        yield start, stop, forms.part(contribution, start, stop)


def squared_norms_and_terms(
    contributions: Sequence[Contribution], samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``‖g_n‖²``, which may round below 0, and what they add, ``(N,)``.

    The latter are the squares of the terms, ``Σ_t ‖u_t‖² ‖z_t‖²``. The former have an
    error of some units in their last place, which is much where positions cancel.
    """
    found = []
    for start, stop in forms.chunks(forms.num_rows(contributions[0]), samples):
        parts = [forms.part(each, start, stop) for each in contributions]
        squared, terms = map(forms.summed, zip(*map(_square_and_terms, parts)))
        for i, a in enumerate(parts):
            for b in parts[i + 1 :]:
                squared = squared.add(_kernel(a, b).flatten(1).sum(1), alpha=2)
        found.append(torch.stack([squared, terms]))
    squared, terms = torch.cat(found, 1).unbind()
    return squared, terms


def gram(
    left: Sequence[Contribution], right: Sequence[Contribution], samples: int
) -> torch.Tensor:
    """Returns ``⟨g_i, g'_j⟩``, ``(N, N')``, from ``samples`` of each at a time."""
    rows = []
    for start, stop in forms.chunks(forms.num_rows(left[0]), samples):
        a, columns = [forms.part(each, start, stop) for each in left], []
        for low, high in forms.chunks(forms.num_rows(right[0]), samples):
            b = a
            if left is not right or low != start:
                b = [forms.part(each, low, high) for each in right]
            columns.append(forms.summed(_pairs(one, other) for one in a for other in b))
        rows.append(torch.cat(columns, 1))
    return torch.cat(rows)


def materialized_squared_norms(
    contributions: Sequence[Contribution], shape: Sequence[int], samples: int
) -> torch.Tensor:
    """Returns ``‖g_n‖²`` from gradients: of some samples at a time."""
    intervals = forms.chunks(forms.num_rows(contributions[0]), samples)
    return torch.cat([squares(_formed(contributions, shape, *i)) for i in intervals])


def materialized_gram(
    left: Sequence[Contribution],
    right: Sequence[Contribution],
    shape: Sequence[int],
    samples: int,
    width: int,
) -> torch.Tensor:
    """Returns `gram` from gradients: ``width`` columns of all samples at a time.

    ``samples`` is how many samples are unfolded at a time.
    """
    rows, columns = forms.matrix_shape(shape)
    terms = []
    for first, last in forms.chunks(columns, width):
        sides = []
        for uses in (left,) if left is right else (left, right):
            some = [forms.columns(use, first, last) for use in uses]
            sides.append(gradients(some, (rows, last - first), samples).flatten(1))
        terms.append(sides[0] @ sides[-1].T)
    return forms.summed(terms)


def gradients(
    contributions: Sequence[Contribution],
    shape: Sequence[int],
    samples: int | None = None,
) -> torch.Tensor:
    """Returns every sample's gradient, ``(N, *shape)``, the sum of the uses.

    ``samples`` is how many samples are unfolded at a time; None: all.
    """
    total = forms.num_rows(contributions[0])
    if samples is None or samples >= total:
        return _formed(contributions, shape, 0, total)
    # Written into place: pieces that are joined later take the memory twice.
    factors = [forms.float_factor(use) for use in contributions]
    dtype = forms.accumulation_dtype(*[each.dtype for each in factors])
    found = factors[0].new_empty(total, *shape, dtype=dtype)
    for start, stop in forms.chunks(total, samples):
        found[start:stop] = _formed(contributions, shape, start, stop)
    return found


def _formed(
    contributions: Sequence[Contribution], shape: Sequence[int], start: int, stop: int
) -> torch.Tensor:
    """Returns the gradients of samples ``[start, stop)``, the sum of the uses."""
    total: torch.Tensor | None = None
    rows, columns = forms.matrix_shape(shape)
    for contribution in contributions:
        match forms.part(contribution, start, stop):
            case Outer(left, right):
                found = left.transpose(2, 3) @ right
            case Lookup(index, values):
                number = torch.arange(stop - start, device=index.device)
                places = index.long() + number.unsqueeze(1) * rows
                found = values.new_zeros((stop - start) * rows, columns)
                found.index_add_(0, places.flatten(), values.flatten(0, 1))
            case Dense(values):
                found = values
        found = found.reshape(stop - start, *shape)
        total = found if total is None else total + found
        del found  # before the next one is formed
    assert total is not None
    return total


def squares(block: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares of every sample, ``(N,)``."""
    return torch.linalg.vector_norm(block.flatten(1), dim=1).square()


def _square_and_terms(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``‖g_n‖²`` of one use and the squares of its terms, ``(N,)`` each."""
    if isinstance(part, Dense):
        terms = squares(part.values)
        return terms, terms
    kernel = _kernel(part, part)
    terms = kernel.diagonal(dim1=-2, dim2=-1)
    return kernel.flatten(1).sum(1), terms.flatten(1).sum(1)


def _kernel(a: Part, b: Part) -> torch.Tensor:
    """Returns ``⟨a_n, b_n⟩`` by pairs of positions, ``(N, ..., T, S)``, to be added."""
    match a, b:
        case Dense(), Dense():
            return (a.values * b.values).flatten(1)[:, None, None]
        case Lookup(), Outer():
            return _kernel(b, a).transpose(-2, -1)
        case Outer(), Outer():
            kernel = a.left @ b.left.transpose(2, 3)
            return kernel * (a.right @ b.right.transpose(2, 3))
        case Lookup(), Lookup():
            same = a.index.unsqueeze(2) == b.index.unsqueeze(1)
            kernel = a.values @ b.values.transpose(1, 2)
            return torch.where(same, kernel, torch.zeros_like(kernel))
        case Outer(), Lookup():
            left, right = a.left.squeeze(1), a.right.squeeze(1)  # (N, T, V), (N, T, q)
            index = b.index.long().unsqueeze(1).expand(-1, a.positions, -1)
            return left.gather(2, index) * (right @ b.values.transpose(1, 2))
    raise AssertionError("no factored product; see plan.has_product")


def _pairs(a: Part, b: Part) -> torch.Tensor:
    """Returns ``⟨a_i, b_j⟩``, ``(n, n')``, from ``n T n' T'`` products per group."""
    if isinstance(a, Dense) and isinstance(b, Dense):
        return a.values.flatten(1) @ b.values.flatten(1).T
    # As one sample that has all positions.
    kernel = _kernel(forms.regroup(a, 1), forms.regroup(b, 1))
    shape = (-1, forms.num_rows(a), a.positions, forms.num_rows(b), b.positions)
    return kernel.reshape(shape).sum((0, 2, 4))


def _flat(factor: torch.Tensor) -> torch.Tensor:
    """Returns ``(N, G, T, p)`` as ``(G, N T, p)``."""
    return factor.transpose(0, 1).flatten(1, 2)
