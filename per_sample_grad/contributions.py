"""How one use of a parameter contributes to every sample's gradient.

Three forms, and the linear algebra on them that never forms a gradient. A parameter of
shape ``(r, ...)`` is a matrix of r rows and c columns, ``c = numel / r``; all forms
agree on that view, so that uses of one parameter by different layers can be combined.

Axes: N rows of the batch (samples, or k consecutive rows for each), G groups, T
positions, p rows and q columns of one group (``G p = r``, ``q = c``), V entries of a
table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True)
class Outer:
    """A sum of T outer products in each of G groups of rows.

    ``g_n[h p + i, j] = Σ_t left[n, h, t, i] · right[n, h, t, j]``.

    Attributes:
        left: ``(N, G, T, p)``, any float dtype.
        right: ``(N, G, T, q)``, any float dtype.
    """

    left: torch.Tensor
    right: torch.Tensor

    @property
    def groups(self) -> int:
        return self.left.shape[1]

    @property
    def positions(self) -> int:
        return self.left.shape[2]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Rows added to a table: ``g_n[index[n, t]] += values[n, t]``.

    An `Outer` whose left factor is one-hot, without the one-hot.

    Attributes:
        index: ``(N, T)``, integers in ``[0, V)``.
        values: ``(N, T, q)``, any float dtype; zero what does not count.
    """

    index: torch.Tensor
    values: torch.Tensor

    @property
    def positions(self) -> int:
        return self.index.shape[1]


@dataclasses.dataclass(frozen=True)
class Dense:
    """The gradients themselves.

    Attributes:
        values: ``(N, *shape of the parameter)``, any float dtype.
    """

    values: torch.Tensor


Contribution = Outer | Lookup | Dense


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a parameter of this shape seen as a matrix.

    >>> matrix_shape((8, 3, 5, 5)), matrix_shape((7,)), matrix_shape(())
    ((8, 75), (7, 1), (1, 1))
    """
    rows = shape[0] if len(shape) else 1
    return rows, math.prod(shape[1:])


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The widest of the dtypes, and at least float32: what sums are kept in."""
    widest = torch.float32
    for dtype in dtypes:
        if dtype.is_floating_point:
            widest = torch.promote_types(widest, dtype)
    return widest


def widened(contribution: Contribution) -> Contribution:
    """Both factors in their common `accumulation_dtype`, outside any graph."""
    match contribution:
        case Outer(left, right):
            dtype = accumulation_dtype(left.dtype, right.dtype)
            return Outer(left.detach().to(dtype), right.detach().to(dtype))
        case Lookup(index, values):
            dtype = accumulation_dtype(values.dtype)
            return Lookup(index.detach(), values.detach().to(dtype))
        case Dense(values):
            return Dense(values.detach().to(accumulation_dtype(values.dtype)))


def regroup(contribution: Contribution, num_samples: int) -> Contribution:
    """From N rows to B samples, each of k = N / B consecutive rows.

    What a layer applied to a folded batch (``x.flatten(0, 1)``) needs: a sample's
    gradient is the sum over its rows, so positions are joined and gradients added.
    """
    match contribution:
        case Outer(left, right):
            return Outer(_joined(left, num_samples), _joined(right, num_samples))
        case Lookup(index, values):
            return Lookup(
                index.reshape(num_samples, -1),
                values.reshape(num_samples, -1, values.shape[-1]),
            )
        case Dense(values):
            if len(values) == num_samples:
                return contribution
            return Dense(values.unflatten(0, (num_samples, -1)).sum(1))


def _joined(factor: torch.Tensor, num_samples: int) -> torch.Tensor:
    if len(factor) == num_samples:
        return factor
    return factor.unflatten(0, (num_samples, -1)).transpose(1, 2).flatten(2, 3)


def merge(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Uses of one parameter, those of a form joined: at most one of each form.

    The outer products of several uses are the positions of one longer use; the cross
    terms between uses then come by themselves. (`Outer` counts as a form per number of
    groups.)
    """
    outers: dict[int, list[Outer]] = {}
    lookups: list[Lookup] = []
    denses: list[Dense] = []
    for contribution in contributions:
        match contribution:
            case Outer():
                outers.setdefault(contribution.groups, []).append(contribution)
            case Lookup():
                lookups.append(contribution)
            case Dense():
                denses.append(contribution)
    merged: list[Contribution] = []
    for alike in outers.values():
        merged.append(alike[0] if len(alike) == 1 else _joined_outers(alike))
    if lookups:
        merged.append(lookups[0] if len(lookups) == 1 else _joined_lookups(lookups))
    if denses:
        total = denses[0].values
        for dense in denses[1:]:
            total = total + dense.values
        merged.append(Dense(total))
    return merged


def _joined_outers(outers: Sequence[Outer]) -> Outer:
    return Outer(
        torch.cat([outer.left for outer in outers], 2),
        torch.cat([outer.right for outer in outers], 2),
    )


def _joined_lookups(lookups: Sequence[Lookup]) -> Lookup:
    return Lookup(
        torch.cat([lookup.index for lookup in lookups], 1),
        torch.cat([lookup.values for lookup in lookups], 1),
    )


def columns(
    contribution: Contribution, shape: Sequence[int], start: int, stop: int
) -> torch.Tensor:
    """Columns ``[start, stop)`` of every sample's gradient: ``(N, r, stop - start)``.

    Costs ``2 N G T p (stop - start)`` flops: chunks together cost what the whole does.
    """
    rows, all_columns = matrix_shape(shape)
    match contribution:
        case Outer(left, right):
            block = left.transpose(2, 3) @ right[..., start:stop]
            return block.flatten(1, 2)
        case Lookup(index, values):
            num, width = len(index), stop - start
            first_row = torch.arange(num, device=index.device).unsqueeze(1) * rows
            table = values.new_zeros(num * rows, width)
            table = table.index_add(
                0,
                (index.long() + first_row).flatten(),
                values[..., start:stop].reshape(-1, width),
            )
            return table.unflatten(0, (num, rows))
        case Dense(values):
            return values.reshape(len(values), rows, all_columns)[..., start:stop]


def dot(contribution: Contribution, vector: torch.Tensor) -> torch.Tensor:
    """``⟨v, g_n⟩`` for every n: ``(N,)``. ``vector`` has the parameter's shape.

    For outer products ``Σ_t u_tᵀ V z_t``: one product with V, no T² term, no gradient.
    """
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
    contribution: Contribution, shape: Sequence[int], weights: torch.Tensor
) -> torch.Tensor:
    """``Σ_n w_n g_n``, of the parameter's shape: the cost of a batch gradient."""
    match contribution:
        case Outer(left, right):
            scaled = left * weights[:, None, None, None]
            p, q = left.shape[3], right.shape[3]
            if p * q <= left.shape[2] * (p + q):
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
