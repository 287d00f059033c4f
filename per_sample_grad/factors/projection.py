"""Two-sided random projections of gradients from their factors (LoGra).

A gradient that is a matrix is multiplied by a small random matrix from either side,
``P G Qᵀ``, and a sum of outer products is then one of projected factors,
``Σ_t (P u_t) (Q z_t)ᵀ`` (Choe et al., arXiv:2405.13954, 3.1): that costs
``T (p k1 + q k2 + k1 k2)``, a small part of the layer's own product where k1 and k2 are
small beside p and q, and no gradient is formed. P and Q have entries of plus and minus
``1 / sqrt(k)`` at random (Achlioptas 2003, doi:10.1016/S0022-0000(03)00025-4), so that
inner products are those of the gradients in expectation over seeds. Both factors of a
gradient of rank one share their projection's error, so that it has more variance than a
dense projection to as many numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import torch

from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution, Dense, Lookup, Outer
from xla_replica.common.arguments import check_integer


class Projection:
    """A linear map from gradients to a few numbers for each parameter.

    It is the same for the same names, shapes, size and seed, on every device. Rows and
    columns of all parameters shrink by one ratio, the largest with which all of it fits
    ``size``; where that is one, gradients stay as they are.

    Args:
        parameters: By name: parameters, or shapes.
        size: k, the most numbers that all gradients of a sample become.
        seed: What draws the signs.

    Attributes:
        shapes: The shape of each parameter, by name.
        kept: k1 and k2, the rows and columns that are left of each parameter's.
        size: The sum of all ``k1 k2``, at most ``size``.

    Raises:
        TypeError, ValueError: An argument is not an integer, or ``size`` has no room
            for one number of each parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor | Sequence[int]],
        size: int,
        *,
        seed: int = 0,
    ) -> None:
        check_integer("size", size, least=1)
        self.seed = check_integer("seed", seed)
        self.shapes = {
            name: tuple(value.shape if isinstance(value, torch.Tensor) else value)
            for name, value in parameters.items()
        }
        if size < len(self.shapes):
            raise ValueError(
                f"size must be at least {len(self.shapes)}, a number for each "
                f"parameter, got {size}"
            )
        self.kept = _kept(self.shapes, size)
        self.size = sum(map(math.prod, self.kept.values()))
        self._tables: dict[tuple[object, ...], tuple[_Table, _Table]] = {}

    def __repr__(self) -> str:
        total = sum(map(math.prod, self.shapes.values()))
        return (
            f"Projection of {total} numbers of {len(self.shapes)} parameters to "
            f"{self.size}, seed {self.seed}"
        )

    def of(self, name: str, uses: Sequence[Contribution], budget: int) -> torch.Tensor:
        """Returns the projections of one parameter's gradients, ``(B, k1 k2)``.

        Args:
            name: The parameter's name.
            uses: What adds to its gradients, at least one.
            budget: Bytes of temporary tensors.
        """
        like = forms.float_factor(uses[0])
        tables = self._tables_like(name, like)
        return forms.summed(
            _project(use, self.shapes[name], tables, budget) for use in uses
        )

    def _tables_like(self, name: str, like: torch.Tensor) -> tuple[_Table, _Table]:
        """Returns P and Q, made once for each device and dtype."""
        key = name, like.device, like.dtype
        if key not in self._tables:
            rows, columns = zip(forms.matrix_shape(self.shapes[name]), self.kept[name])
            self._tables[key] = (
                _signs(*rows, f"{self.seed} {name} rows", like),
                _signs(*columns, f"{self.seed} {name} columns", like),
            )
        return self._tables[key]


# Of shape ``(k, n)``; None: all numbers are kept.
_Table = torch.Tensor | None


def _kept(shapes: Mapping[str, Sequence[int]], size: int) -> dict[str, tuple[int, int]]:
    """Returns the rows and columns that are kept, by the largest common ratio."""

    def at(ratio: float) -> dict[str, tuple[int, int]]:
        return {
            name: tuple(max(1, int(n * ratio)) for n in forms.matrix_shape(shape))
            for name, shape in shapes.items()
        }

    # Only these ratios change anything.
    sides = {n for shape in shapes.values() for n in forms.matrix_shape(shape)}
    low, high = 0.0, 1.0
    if sum(map(math.prod, at(high).values())) <= size:
        return at(high)
    while high - low > 1e-3 / max(sides):
        middle = (low + high) / 2
        if sum(map(math.prod, at(middle).values())) <= size:
            low = middle
        else:
            high = middle
    return at(low)


def _signs(count: int, kept: int, seed: str, like: torch.Tensor) -> _Table:
    """Returns ``(kept, count)`` random signs over ``sqrt(kept)``; None if all stay."""
    if kept == count:
        return None
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
    bits = torch.randint(0, 2, (kept, count), generator=generator, dtype=torch.int8)
    signs = (2 * bits - 1).to(like.dtype) / math.sqrt(kept)
    return signs.to(like.device)


def _project(
    use: Contribution, shape: Sequence[int], tables: tuple[_Table, _Table], budget: int
) -> torch.Tensor:
    """Returns ``P G Qᵀ`` of every sample's gradient of one use, ``(N, k1 k2)``."""
    itemsize = forms.float_factor(use).dtype.itemsize
    kept = [
        number if table is None else len(table)
        for number, table in zip(forms.matrix_shape(shape), tables)
    ]
    rows, _ = forms.matrix_shape(shape)
    elements = forms.unfolded_elements(use) + (rows + forms.num_positions(use)) * sum(
        kept
    )
    size = max(1, budget // (elements * itemsize))
    found = [
        _project_part(forms.part(use, *interval), shape, *tables)
        for interval in forms.chunks(forms.num_rows(use), size)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _project_part(
    part: Outer | Lookup | Dense, shape: Sequence[int], rows: _Table, columns: _Table
) -> torch.Tensor:
    match part:
        case Dense(values):
            matrix = values.reshape(len(values), *forms.matrix_shape(shape))
            matrix = _times(matrix, columns)
            return (matrix if rows is None else rows @ matrix).flatten(1)
        case Lookup(index, values):
            count = forms.matrix_shape(shape)[0]
            values = _times(values, columns)
            if rows is None:
                matrix = values.new_zeros(len(values), count, values.shape[2])
                places = index.long().unsqueeze(2).expand_as(values)
                return matrix.scatter_add(1, places, values).flatten(1)
            found = rows.T.index_select(0, index.flatten().long())
            found = found.view(*index.shape, -1)
            return (found.transpose(1, 2) @ values).flatten(1)
        case Outer(left, right):
            return _project_outer(left, right, rows, columns).flatten(1)


def _project_outer(
    left: torch.Tensor, right: torch.Tensor, rows: _Table, columns: _Table
) -> torch.Tensor:
    """Returns the projections of outer products, in the cheapest sequence."""
    _, groups, positions, p = left.shape
    q = right.shape[3]
    k1 = groups * p if rows is None else len(rows)
    k2 = q if columns is None else len(columns)
    # Flops of one sample for each group; rows that all stay cannot be summed by group.
    costs = {
        "both first": positions * (p * k1 + q * k2 + k1 * k2),
        "rows last": positions * (q * k2 + p * k2) + k1 * p * k2,
        "columns last": positions * (p * k1 + k1 * q) + k1 * q * k2 / groups,
    }
    if rows is None:
        costs = {"rows last": 0}
    sequence = min(costs, key=lambda name: costs[name])
    if sequence != "columns last":
        right = _times(right, columns)
    if sequence == "rows last":
        matrix = (left.transpose(2, 3) @ right).flatten(1, 2)
        return matrix if rows is None else rows @ matrix
    assert rows is not None
    left = left @ rows.T.unflatten(0, (groups, p))
    matrix = left.flatten(1, 2).transpose(1, 2) @ right.flatten(1, 2)
    return matrix if sequence == "both first" else _times(matrix, columns)


def _times(factor: torch.Tensor, table: _Table) -> torch.Tensor:
    """Returns ``factor Qᵀ``, over the last axis."""
    return factor if table is None else factor @ table.T
