"""Signs from inner products, which all balancers share.

The sign of a vector z is +1 if its inner product p with the signed sum ``a`` of the
vectors before it is below a threshold; then ``a += sign * z``. With K = Z Z^T and u = Z
a of a tile of vectors, all p follow without touching a vector again: ``p_i = u_i +
sum_{j<i} sign_j K_ij``. This is exact, so a tile of any size gives the same signs.

The recursion is solved as a fixed point, ``p <- u + strictly_lower(K) sign(p)``: after
k rounds at least the first k + 1 signs are right, and further rounds do not change
them. The rounds end when one changes nothing: on a CPU at once, on a compiled backend
in a loop on the device, and on a GPU, which has to be waited for, after up to
`_ROUNDS_BETWEEN_LOOKS` more.

Axes: R rows of a tile, D columns (parameters, or this replica's share of them), V
accumulators.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from xla_replica import comparable, lazy_operation, traits

TIES = ("negative", "positive")
# What a sum of weights is at least where it divides: of nothing, the mean is zero.
SMALLEST = 1e-30
# On a GPU. Rounds are four launches each; signs of uncorrelated rows settle in a tenth
# of them.
_ROUNDS_BETWEEN_LOOKS = 32


@dataclasses.dataclass(frozen=True)
class Decisions:
    """How signs are decided in one step.

    Attributes:
        tie: The sign where p equals the threshold. 'negative' is the convention of
            grab-sampler, 'positive' that of the papers' code.
        thresholds_RN: ``(rows, draws)``: the sign is +1 where p is below it. None
            means 0. Thresholds of samples that wait for a partner come first.
            The self-balancing walk (Alweiss, Liu and Sawhney, arXiv:2006.14009) takes
            +1 with probability 1/2 - p / 2c, which is p < c (1 - 2 uniform).
        weights_R: The weights of the samples of this step in their updates, which their
            vectors are multiplied by. None: all have the weight one.
        sum_: Adds partial inner products over the shards of the columns, in place;
            None: one shard holds all columns, so they are whole.
        tile_size: How many rows' inner products are formed at once; None means all.
        row_by_row: Whether rows are balanced one after the other; see `balance_rows`.
    """

    tie: str = "negative"
    thresholds_RN: Tensor | None = None
    weights_R: Tensor | None = None
    sum_: Callable[[list[Tensor]], None] | None = None
    tile_size: int | None = None
    row_by_row: bool = False

    def tiles(self, *of_rows: Tensor | None) -> Iterator[list[Any]]:
        """Yields tiles of rows and, of each of the others, its part for these rows."""
        num_rows = max(len(of_rows[0]), 1)  # type: ignore[arg-type]
        size = self.tile_size or num_rows
        for start in range(0, num_rows, size):
            own = slice(start, start + size)
            yield [each if each is None else each[own] for each in of_rows]

    def whole(self, partial: Tensor) -> Tensor:
        """Returns partial inner products summed over the shards of the columns."""
        if self.sum_ is not None:
            self.sum_([partial])
        return partial

    def gram(
        self, rows_RD: Tensor, vectors_VD: Tensor, centre_1D: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns inner products of rows, ``(R, R)``, and with vectors, ``(R, V)``.

        With a centre they are those of ``rows - centre``, which is not formed. This
        takes one sum over the shards. A row that is not finite affects its own row and
        column of the first and its own row of the second, nothing else.
        """
        parts = [rows_RD @ rows_RD.T, rows_RD @ vectors_VD.T]
        if centre_1D is not None:
            # Products are joined rather than vectors, of which a tree has many.
            parts[1] = torch.cat([parts[1], rows_RD @ centre_1D.T], 1)
            of_centre = [centre_1D @ each.T for each in (vectors_VD, centre_1D)]
            parts.append(torch.cat(of_centre, 1))
        if self.sum_ is not None:
            self.sum_(parts)
        gram, products = parts[:2]
        if centre_1D is None:
            return gram, products
        with_centre, of_centre_1V = products[:, -1:], parts[2]
        gram = gram - with_centre - with_centre.T + of_centre_1V[:, -1:]
        return gram, products[:, :-1] - of_centre_1V[:, :-1]

    def below(self, products: Tensor, thresholds: Tensor | None) -> Tensor:
        """Returns where the sign is +1, bool in the shape of ``products``."""
        limit = comparable(0.0, products) if thresholds is None else thresholds
        return products < limit if self.tie == "negative" else products <= limit

    def signs(
        self,
        products_R: Tensor,
        gram_RR: Tensor,
        finite_R: Tensor,
        thresholds_R: Tensor | None = None,
    ) -> Tensor:
        """Returns the signs, 1 or -1, of R vectors balanced one after the other.

        ``products_R`` are their inner products with the accumulator before the first,
        ``gram_RR`` those with one another. A vector that is not ``finite_R``, bool,
        gets sign 0 and does not affect those after it.
        """
        positive = finite_R.to(products_R.dtype)
        negative = -positive
        products = torch.where(finite_R, products_R, torch.zeros_like(products_R))
        both = finite_R & finite_R.unsqueeze(1)
        gram = torch.where(both, gram_RR, torch.zeros_like(gram_RR))
        # Row i, columns j < i: what earlier signs add to p_i.
        earlier = torch.tril(gram, diagonal=-1)
        kind = traits(products)
        if kind.is_lazy:
            zeros = torch.zeros_like(products)
            limits = zeros if thresholds_R is None else thresholds_R
            return _rounds(products, earlier, positive, limits, tie=self.tie)
        between_looks = 1 if kind.is_host else _ROUNDS_BETWEEN_LOOKS
        below = self.below(products, thresholds_R)
        for number in range(1, len(products)):
            signs = torch.where(below, positive, negative)
            before = below
            below = self.below(products + torch.mv(earlier, signs), thresholds_R)
            if number % between_looks == 0 and torch.equal(before, below):
                break
        return torch.where(below, positive, negative)


@lazy_operation
def _rounds(
    products_R: Any, earlier_RR: Any, positive_R: Any, limits_R: Any, *, tie: str
) -> Any:
    """Builds the fixed-point iteration of `Decisions.signs` as a loop of XLA's."""
    size, dtype = products_R.shape().sizes[0], products_R.shape().dtype

    def number(beside: Any, value: float) -> Any:
        return type(beside).scalar(beside.builder(), value, dtype)

    def add(a: Any, b: Any) -> Any:
        return a + b

    def signs_of(products: Any, positive: Any, limits: Any) -> Any:
        below = products < limits if tie == "negative" else products <= limits
        return below.select(positive, -positive)

    def has_changed(before: Any, signs: Any, *rest: Any) -> Any:
        change, zero = signs - before, number(signs, 0.0)
        return (change * change).reduce(zero, add, (0,)) > zero

    def again(before: Any, signs: Any, products: Any, earlier: Any, *rest: Any) -> Any:
        # Not a matrix product, which a TPU would round to bfloat16.
        terms = earlier * signs.broadcast_in_dim((size, size), (1,))
        found = products + terms.reduce(number(terms, 0.0), add, (1,))
        return signs, signs_of(found, *rest), products, earlier, *rest

    first = signs_of(products_R, positive_R, limits_R)
    before = number(first, 2.0).broadcast((size,))  # no sign, so a round is run
    state = (before, first, products_R, earlier_RR, positive_R, limits_R)
    return first.mkwhile(state, has_changed, again).get_tuple_element(1)


def squared_norms(rows_RD: Tensor) -> Tensor:
    """Returns the rows' squared norms, ``(R,)``, without a copy of the rows."""
    return torch.square(torch.linalg.vector_norm(rows_RD, dim=1))


def without_nan(rows_RD: Tensor) -> Tensor:
    """Returns the rows with a huge number in place of what is not finite.

    Its square overflows, so the norm of the row shows it; but its product with a weight
    of 0 is 0, so leaving the row out takes no other pass through all rows.
    """
    # On a CPU a look costs little.
    if traits(rows_RD).is_host and math.isfinite(float(rows_RD.sum())):
        return rows_RD
    huge = torch.finfo(rows_RD.dtype).max / 4
    return torch.nan_to_num(rows_RD, nan=huge, posinf=huge, neginf=huge)


def mark_nonfinite(values_RD: Tensor, *sources_RD: Tensor) -> Tensor:
    """Returns ``values``, made huge where a source they come from is not finite."""
    huge = torch.finfo(values_RD.dtype).max / 4
    for source in sources_RD:
        if not (traits(source).is_host and math.isfinite(float(source.sum()))):
            small = source.abs() < comparable(huge, source)
            values_RD = torch.where(small, values_RD, huge)
    return values_RD
