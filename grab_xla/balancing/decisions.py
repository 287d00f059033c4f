"""Signs from inner products, which all balancers share.

The sign of a vector z is +1 if its inner product p with the signed sum ``a`` of the
vectors before it is below a threshold; then ``a += sign * z``. With K = Z Z^T and u = Z
a of a step's vectors, all p follow without touching a vector again: ``p_i = u_i +
sum_{j<i} sign_j K_ij``. This is exact, so steps of any size give the same signs.

The recursion is solved as a fixed point, ``p <- u + strictly_lower(K) sign(p)``: after
k rounds at least the first k + 1 signs are right, and further rounds do not change
them. The rounds end when one changes nothing: on a CPU at once, on a compiled backend
in a loop on the device, and on a GPU, which has to be waited for, after up to
`_ROUNDS_BETWEEN_LOOKS` more.

Where a CPU has whole vectors, it is fastest to balance one after the other: inner
products of all rows of a step are more of them, and in a tree they are products with
all of its nodes, of which a row passes few.

Axes: R rows of a step, D columns (parameters, or this replica's share of them), V
accumulators.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xla_replica import comparable, lazy_operation, traits, where_finite

TIES = ("negative", "positive")
# On a GPU. Rounds are four launches each; signs of uncorrelated rows settle in a tenth
# of them.
_ROUNDS_BETWEEN_LOOKS = 32
# Row by row, longer differences are formed in pieces, every time that they are read, so
# that a step of one row, such as a group's, forms no other vector of the model's size.
_PIECE = 2**20


@dataclasses.dataclass(frozen=True)
class Decisions:
    """How signs are decided in one step.

    Attributes:
        tie: The sign where p equals the threshold. 'negative' is the convention of
            grab-sampler, 'positive' that of the papers' code.
        thresholds_RN: ``(rows, draws)``: those of the rows that are balanced, at every
            level of a tree; the sign is +1 where p is below it. None means 0.
            Thresholds of samples that wait for a partner come first.
            The self-balancing walk (Alweiss, Liu and Sawhney, arXiv:2006.14009) takes
            +1 with probability 1/2 - p / 2c, which is p < c (1 - 2 uniform).
        sum_: Adds partial inner products over the shards of the columns, in place;
            where one shard holds all columns, they are whole.
        row_by_row: Whether rows are balanced one after the other; on a CPU that has
            all columns.
        at_once: How many rows a balance type may copy at once; None means all.
    """

    tie: str = "negative"
    thresholds_RN: Tensor | None = None
    sum_: Callable[[list[Tensor]], None] = lambda partial: None
    row_by_row: bool = False
    at_once: int | None = None

    def parts(self, rows_RD: Tensor, size: int) -> Iterator[tuple[Tensor, Decisions]]:
        """Yields ``size`` rows after others, each time with the decisions of them."""
        for number, rows in enumerate(rows_RD.split(size)):
            limits = self.thresholds_RN
            if limits is not None:
                limits = limits[number * size :][:size]
            yield rows, dataclasses.replace(self, thresholds_RN=limits)

    def whole(self, partial: Tensor) -> Tensor:
        """Returns partial inner products summed over the shards of the columns."""
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
            parts += [centre_1D @ each.T for each in (rows_RD, vectors_VD, centre_1D)]
        self.sum_(parts)
        gram, products, *of_centre = parts
        if centre_1D is None:
            return gram, products
        with_rows_1R, with_vectors_1V, square = of_centre
        gram = gram - with_rows_1R.T - with_rows_1R + square
        return gram, products - with_vectors_1V

    def balance(
        self,
        sums: Tensor,
        rows_RD: Tensor,
        centre: Tensor | None = None,
        depth: int = 0,
    ) -> Tensor:
        """Balances ``rows - centre`` down a tree of accumulators.

        Args:
            sums: ``(V, D)`` or ``(V + 1, D)``, changed in place: the accumulators of
                the tree, V = 2^(depth + 1) - 1, node v with the children 2v + 1 and
                2v + 2, and perhaps the plain sum of what was balanced.
            rows_RD: The rows. One that is not finite is left out.
            centre: ``(1, D)``, or None for zero; where the decisions are made
                `row_by_row` also ``(R, D)``.
            depth: The number of levels below the root.

        Returns:
            The placements, ``(R,)``, 0 where a row is not finite; see `reorder`.
        """
        if self.row_by_row:
            return self._one_by_one(sums, rows_RD, centre, depth)
        rows_RD = without_nan(rows_RD)
        num_nodes = 2 ** (depth + 1) - 1
        gram, products = self.gram(rows_RD, sums[:num_nodes], centre)
        finite = where_finite(torch.diagonal(gram))
        factors, placements = self._walk(products, gram, finite, depth)
        if len(sums) > num_nodes:
            factors.append(finite.to(sums.dtype).unsqueeze(1))
        factors_VR = torch.cat(factors, dim=1).T
        sums.addmm_(factors_VR, rows_RD)
        if centre is not None:
            sums.addcmul_(factors_VR.sum(1, keepdim=True), centre, value=-1)
        return placements

    def _one_by_one(
        self, sums: Tensor, rows_RD: Tensor, centre: Tensor | None, depth: int
    ) -> Tensor:
        """Does what `balance` does, row by row; placements are int32."""
        others = [None] if centre is None else centre.numpy()
        given = self.thresholds_RN
        limits = [[0.0] * (depth + 1)] if given is None else given.tolist()
        parts = [slice(i, i + _PIECE) for i in range(0, sums.shape[1], _PIECE)]
        totals = [[total[part] for part in parts] for total in sums.numpy()]
        rows = zip(rows_RD.numpy(), itertools.cycle(others), itertools.cycle(limits))
        with np.errstate(all="ignore"):
            placements = [
                _down_a_tree(_difference(x, y, parts), totals, own, self.tie)
                for x, y, own in rows
            ]
        return torch.tensor(placements, dtype=torch.int32)

    def _walk(
        self, products_RV: Tensor, gram_RR: Tensor, finite_R: Tensor, depth: int
    ) -> tuple[list[Tensor], Tensor]:
        """Returns the signs at the nodes of each level, and ``(R,)`` placements.

        Level by level, rows at the same node are decided one after the other; at nodes
        that a row does not pass its sign is 0.
        """
        given = self.thresholds_RN
        limits = [None] * (depth + 1) if given is None else given.T
        signs = self.signs(products_RV[:, 0], gram_RR, finite_R, limits[0])
        signs_of_levels, place = [signs.unsqueeze(1)], None
        for level in range(1, depth + 1):
            # TPUs emulate int64.
            place = (signs < 0).int() + (0 if place is None else 2 * place)
            places = torch.arange(2**level, dtype=torch.int32, device=place.device)
            is_here = place.unsqueeze(1) == places
            products = products_RV[:, 2**level - 1 : 2 ** (level + 1) - 1]
            products = torch.where(is_here, products, torch.zeros_like(products))
            together = place.unsqueeze(1) == place
            gram = torch.where(together, gram_RR, torch.zeros_like(gram_RR))
            signs = self.signs(products.sum(1), gram, finite_R, limits[level])
            signs_of_levels.append(is_here * signs.unsqueeze(1))
        return signs_of_levels, signs if place is None else signs * (place + 1)

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


Pieces = Iterable[np.ndarray]
Difference = Callable[[], Pieces]


def _difference(
    x: np.ndarray, y: np.ndarray | None, parts: Sequence[slice]
) -> Difference:
    """Returns what yields the pieces of x - y."""
    if y is not None and len(parts) > 1:
        return lambda: (x[part] - y[part] for part in parts)
    z = x if y is None else x - y
    return functools.partial(iter, [z[part] for part in parts])


def _down_a_tree(
    difference: Difference, totals: Sequence[Pieces], limits: Sequence[float], tie: str
) -> int:
    """Returns the placement of a row, and adds it to the accumulators it passes."""
    if not math.isfinite(sum(map(np.dot, difference(), difference()), 0.0)):
        return 0
    node = placement = 0
    for level, limit in enumerate(limits):
        product = sum(map(np.dot, difference(), totals[node]), 0.0)
        positive = product < limit or (tie == "positive" and product == limit)
        for total, piece in zip(totals[node], difference()):
            (np.add if positive else np.subtract)(total, piece, out=total)
        leaf = node - 2**level + 2
        placement = leaf if positive else -leaf
        node = 2 * node + (1 if positive else 2)
    if len(totals) == 2 ** len(limits):
        for total, piece in zip(totals[-1], difference()):
            np.add(total, piece, out=total)
    return placement


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
