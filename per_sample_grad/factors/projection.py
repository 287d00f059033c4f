"""Two-sided random projections of gradients from their factors.

A gradient that is a matrix is multiplied by a small random matrix from either side,
``P G Qᵀ``, and a sum of outer products is then one of projected factors,
``Σ_t (P u_t) (Q z_t)ᵀ`` (LoGra: Choe et al., arXiv:2405.13954, 3.1), so that no
gradient is formed. P and Q add every row, or column, to one of the k that are kept, in
turn and with a random sign: a count sketch (Charikar et al. 2002,
doi:10.1007/3-540-45465-9_59), so that inner products are those of the gradients in
expectation over seeds, with the variance of dense signs. After the sum over positions
that costs a pass over what is left and no product; before it, a product with as few
columns as are kept. Convolutions fold the channels of their input first, with one sign
for all offsets in the kernel, because unfolded patches are most of their cost.

Both factors of a gradient of rank one share their projection's error, so that it has
more variance than a projection of the whole gradient to as many numbers.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution, Dense, Lookup, Outer, Windows
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
        self._folds: dict[tuple[object, ...], _Folds] = {}

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
        folds = self._folds_like(name, forms.float_factor(uses[0]))
        return forms.summed([_project(use, folds, budget) for use in uses])

    def _folds_like(self, name: str, like: torch.Tensor) -> _Folds:
        """Returns P and Q of a parameter, made once for each device and dtype."""
        key = name, like.device, like.dtype
        if key not in self._folds:
            shape, (k1, k2) = self.shapes[name], self.kept[name]
            (rows, columns), kernel = forms.matrix_shape(shape), math.prod(shape[2:])

            def fold(count: int, kept: int, axis: str) -> _Fold | None:
                return _fold(count, kept, f"{self.seed} {name} {axis}", like)

            of_channels = None
            if kernel > 1:
                fewest = max(_FEWEST_CHANNELS, -(-k2 // kernel))
                of_channels = fold(columns // kernel, fewest, "channels")
            if of_channels is not None:
                columns = of_channels.kept * kernel
            of_rows, of_columns = fold(rows, k1, "rows"), fold(columns, k2, "columns")
            sizes = rows, columns, kernel
            self._folds[key] = _Folds(of_rows, of_channels, of_columns, *sizes)
        return self._folds[key]


# A convolution's input keeps at least so many channels, if it has them.
_FEWEST_CHANNELS = 4
# Numbers are added up by a product with a matrix where no more are kept.
_MOST_BY_PRODUCT = 32
# As long as so many operations of a product takes a CPU to write a number.
_FLOPS_PER_ELEMENT = 32


@dataclasses.dataclass(frozen=True)
class _Fold:
    """Numbers along an axis, each added with its sign to one of those that are kept.

    Attributes:
        signs: ``(n,)``; number i is added to number ``i % kept``.
        kept: k.
        matrix: ``(n, k)``: the same, if k is small enough for products with it.
    """

    signs: torch.Tensor
    kept: int
    matrix: torch.Tensor | None

    def along(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the sums along a dimension, of which n becomes ``kept``."""
        after = values.shape[dim + 1 :]
        if self.matrix is not None and not after:
            return values @ self.matrix
        if self.matrix is not None and len(after) == 1:
            if values.is_contiguous():
                return self.matrix.T @ values
            return (values.transpose(-1, -2) @ self.matrix).transpose(-1, -2)
        signed = values * self.signs.view(-1, *(1 for _ in after))
        whole = len(self.signs) // self.kept * self.kept
        total = signed.narrow(dim, 0, whole).unflatten(dim, (-1, self.kept)).sum(dim)
        rest = signed.narrow(dim, whole, len(self.signs) - whole)
        total.narrow(dim, 0, rest.shape[dim]).add_(rest)
        return total

    @property
    def flops(self) -> int:
        """About what it takes for each of the n numbers."""
        return 2 * min(self.kept, _MOST_BY_PRODUCT)


class _Folds(NamedTuple):
    """P, and Q as two folds one after the other; None: all numbers stay.

    ``num_rows`` and ``num_columns`` are the numbers of a gradient before P and after
    the first fold of Q; ``kernel`` is how many columns a channel has.
    """

    rows: _Fold | None
    channels: _Fold | None
    columns: _Fold | None
    num_rows: int
    num_columns: int
    kernel: int


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


def _fold(count: int, kept: int, seed: str, like: torch.Tensor) -> _Fold | None:
    """Returns a fold of ``count`` numbers with random signs; None if all stay."""
    if kept >= count:
        return None
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
    bits = torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8)
    signs, matrix = (2 * bits - 1).to(like.dtype), None
    if kept <= _MOST_BY_PRODUCT:
        matrix = torch.eye(kept, dtype=like.dtype).repeat(-(-count // kept), 1)
        matrix = (matrix[:count] * signs.unsqueeze(1)).to(like.device)
    return _Fold(signs.to(like.device), kept, matrix)


def _project(use: Contribution, folds: _Folds, budget: int) -> torch.Tensor:
    """Returns ``P G Qᵀ`` of every sample's gradient of one use, ``(N, k1 k2)``."""
    if folds.channels is not None:
        use = _fewer_channels(use, folds.channels, folds.kernel)
    like = forms.float_factor(use)
    kept = _kept_of(folds.num_rows, folds.rows)
    kept += _kept_of(folds.num_columns, folds.columns)
    elements = (folds.num_rows + forms.num_positions(use)) * kept
    elements += forms.unfolded_elements(use)
    size = max(1, budget // (elements * like.dtype.itemsize))
    if size >= len(like) and not isinstance(use, Windows):
        return _project_part(use, folds)
    found = [
        _project_part(forms.part(use, *interval), folds)
        for interval in forms.chunks(len(like), size)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _fewer_channels(use: Contribution, channels: _Fold, kernel: int) -> Contribution:
    """Returns a use with its input channels folded."""

    def folded(values: torch.Tensor) -> torch.Tensor:
        by_channel = values.unflatten(-1, (-1, kernel))
        return channels.along(by_channel, values.dim() - 1).flatten(-2)

    match use:
        case Windows(left, source):
            by_group = source.to(left.dtype).unflatten(1, (use.groups, -1)).flatten(3)
            fewer = channels.along(by_group, 2).flatten(1, 2)
            fewer = fewer.unflatten(2, source.shape[2:])
            return dataclasses.replace(use, source=fewer, direct=None)
        case Outer(left, right):
            return Outer(left, folded(right))
        case Lookup(index, values):
            return Lookup(index, folded(values))
        case Dense(values):
            return Dense(folded(values.flatten(2)))


def _project_part(part: Outer | Lookup | Dense, folds: _Folds) -> torch.Tensor:
    match part:
        case Dense(values) if folds.num_columns == 1:
            return _along(values.flatten(1), folds.rows, 1)
        case Dense(values):
            matrix = values.reshape(-1, folds.num_rows, folds.num_columns)
            matrix = _along(matrix, folds.rows, 1)
            return _along(matrix, folds.columns, 2).flatten(1)
        case Lookup(index, values):
            values, places = _along(values, folds.columns, 2), index.long()
            if folds.rows is not None:
                signs = folds.rows.signs.index_select(0, places.flatten())
                values = values * signs.view(*index.shape, 1)
                places = places % folds.rows.kept
            rows = _kept_of(folds.num_rows, folds.rows)
            matrix = values.new_zeros(len(values), rows, values.shape[2])
            places = places.unsqueeze(2).expand_as(values)
            return matrix.scatter_add(1, places, values).flatten(1)
        case Outer(left, right):
            return _project_outer(left, right, folds).flatten(1)


def _project_outer(
    left: torch.Tensor, right: torch.Tensor, folds: _Folds
) -> torch.Tensor:
    """Returns the projections of outer products, each side folded when it is cheapest.

    Rows of several groups are folded last, since each group has its own.
    """
    _, groups, positions, p = left.shape
    q, of_rows, of_columns = right.shape[3], folds.rows, folds.columns

    def cost(rows_first: bool, columns_first: bool) -> int:
        a, b, each, after = p, q, 0, 0
        if rows_first and of_rows is not None:
            a, each = of_rows.kept, each + p * of_rows.flops
        if columns_first and of_columns is not None:
            b, each = of_columns.kept, each + q * of_columns.flops
        if not rows_first and of_rows is not None:
            after += p * b * of_rows.flops
        if not columns_first and of_columns is not None:
            after += _kept_of(p, of_rows) * q * of_columns.flops
        return positions * (each + 2 * a * b) + _FLOPS_PER_ELEMENT * a * b + after

    orders = [(True, True), (False, True), (True, False), (False, False)]
    orders = orders if groups == 1 else orders[1::2]
    rows_first, columns_first = min(orders, key=lambda order: cost(*order))
    # (N, G, p, T): convolutions have their positions last already.
    left = left.transpose(2, 3)
    if rows_first:
        left = _along(left, of_rows, 2)
    if columns_first:
        right = _along(right, of_columns, 3)
    if positions == 1:
        matrix = left * right
    elif left.shape[2] <= right.shape[3]:
        matrix = left @ right
    else:  # faster in this order on a CPU
        matrix = (right.transpose(2, 3) @ left.transpose(2, 3)).transpose(2, 3)
    matrix = matrix.flatten(1, 2)
    if not rows_first:
        matrix = _along(matrix, of_rows, 1)
    return matrix if columns_first else _along(matrix, of_columns, 2)


def _along(values: torch.Tensor, fold: _Fold | None, dim: int) -> torch.Tensor:
    return values if fold is None else fold.along(values, dim)


def _kept_of(count: int, fold: _Fold | None) -> int:
    return count if fold is None else fold.kept
