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
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from per_sample_grad.factors import forms
from xla_replica import traits
from xla_replica.common.arguments import check_integer
from xla_replica.common.names import unwrapped

# Counts changes after which the same names, shapes, size and seed are another map. It
# is kept with projections on a disk.
VERSION = 3


class Projection:
    """A linear map from gradients to a few numbers for each parameter.

    It is the same for the same names, shapes, size and seed, on every device, whatever
    wraps the model (``module.``, ``_orig_mod.``). All
    parameters keep one share of their numbers, the largest with which all of it fits
    ``size``; where that is one, gradients stay as they are. The shorter side keeps few
    numbers and the longer one many or all, because that is cheap and not worse. What is
    left of a side that kept fewer than the other comes first in the sequence of the
    numbers: those of the longer one are next to one another.

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
                f"size must be at least {len(self.shapes)} (parameters), got {size}"
            )
        # The names that each parameter's signs are drawn from.
        self._drawn_from = {name: unwrapped(name) for name in self.shapes}
        if len(set(self._drawn_from.values())) < len(self.shapes):
            self._drawn_from = {name: name for name in self.shapes}
        self._folds: dict[tuple[object, ...], Folds] = {}
        self.kept = _kept(self.shapes, size)
        self.size = sum(map(math.prod, self.kept.values()))

    def __repr__(self) -> str:
        total = sum(map(math.prod, self.shapes.values()))
        shapes = [(self._drawn_from[n], shape) for n, shape in self.shapes.items()]
        return (
            f"Projection of {total} numbers of {len(self.shapes)} parameters to "
            f"{self.size}, seed {self.seed}, map {VERSION}, names "
            f"{zlib.crc32(repr(shapes).encode()):08x}"
        )

    def of(
        self, name: str, uses: Sequence[forms.Contribution], budget: int
    ) -> torch.Tensor:
        """Returns the projections of one parameter's gradients, ``(B, k1 k2)``.

        Args:
            name: The parameter's name.
            uses: What adds to its gradients, at least one.
            budget: Bytes of temporary tensors.
        """
        folds = self.folds_like(name, forms.float_factor(uses[0]))
        return forms.summed([_project(use, folds, budget) for use in uses])

    def folds_like(self, name: str, like: torch.Tensor) -> Folds:
        """Returns P and Q of a parameter, made once for each device and dtype."""
        key = name, like.device, like.dtype
        if key not in self._folds:
            shape, (k1, k2) = self.shapes[name], self.kept[name]
            (rows, columns), kernel = forms.matrix_shape(shape), math.prod(shape[2:])

            def fold(count: int, kept: int, axis: str) -> Fold | None:
                drawn_from = self._drawn_from[name]
                return _fold(count, kept, f"{self.seed} {drawn_from} {axis}", like)

            of_channels = None
            if kernel > 1:
                num_channels = max(_MOST_CHANNELS, -(-k2 // kernel))
                of_channels = fold(columns // kernel, num_channels, "channels")
            if of_channels is not None:
                columns = of_channels.kept * kernel
            of_rows, of_columns = fold(rows, k1, "rows"), fold(columns, k2, "columns")
            sizes = rows, columns, kernel
            self._folds[key] = Folds(of_rows, of_channels, of_columns, *sizes)
        return self._folds[key]


# The shorter side of a projection, and a convolution's input, keep no more than this:
# it is what sums over positions cost, and the same number of entries keeps inner
# products as well when they are one long side (measured on a CNN and a transformer).
_MOST_OF_SHORTER = 8
_MOST_CHANNELS = 1
# Where it would keep more, it keeps so few that the longer side need not be folded, but
# no fewer than the first number; if they were fewer, it keeps the second.
_LEAST_OF_SHORTER, _FEW_OF_SHORTER = 3, 4
# Numbers are added up by a product with a matrix where no more are kept, or where there
# are few; and where the matrix is small.
_MOST_BY_PRODUCT = 32
_FEW = 2**22
_LARGEST_MATRIX = 2**18
# The bytes of patches that are unfolded at a time, which stay in a CPU's cache.
_CACHE = 2**21


@dataclasses.dataclass(frozen=True)
class Fold:
    """Numbers along an axis, each added with its sign to one of those that are kept.

    Attributes:
        signs: ``(n,)``; number i is added to number ``i % kept``.
        kept: k.
        matrix: ``(k, n)``: the same, if it is small enough for products with it.
    """

    signs: torch.Tensor
    kept: int
    matrix: torch.Tensor | None

    def along(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the sums along a dimension, of which n becomes ``kept``."""
        after = values.dim() - dim - 1
        if after == 1 and not values.is_contiguous():  # its transpose is, likely
            return self.along(values.transpose(-1, -2), dim + 1).transpose(-1, -2)
        few = values.numel() * self.kept <= _FEW or self.kept <= _MOST_BY_PRODUCT
        if self.matrix is not None and few and after < 2:
            return self.matrix @ values if after else F.linear(values, self.matrix)
        signed = values * self.signs.view(-1, *[1] * after)
        rest = -len(self.signs) % self.kept
        if rest:  # zeros add nothing
            signed = F.pad(signed, (*[0] * (2 * after), 0, rest))
        return torch.sum(signed.unflatten(dim, (-1, self.kept)), dim)


class Folds(NamedTuple):
    """P, and Q as two folds one after the other; None: all numbers stay.

    ``num_rows`` and ``num_columns`` are the numbers of a gradient before P and after
    the first fold of Q; ``kernel`` is how many columns a channel has.
    """

    rows: Fold | None
    channels: Fold | None
    columns: Fold | None
    num_rows: int
    num_columns: int
    kernel: int

    @property
    def kept(self) -> tuple[int, int]:
        """k1 and k2."""
        k1 = self.num_rows if self.rows is None else self.rows.kept
        return k1, self.num_columns if self.columns is None else self.columns.kept


def _kept(shapes: Mapping[str, Sequence[int]], size: int) -> dict[str, tuple[int, int]]:
    """Returns the rows and columns that are kept, by the largest common share."""

    def at(ratio: float) -> dict[str, tuple[int, int]]:
        return {name: _kept_at(ratio, shape) for name, shape in shapes.items()}

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


def _kept_at(ratio: float, shape: Sequence[int]) -> tuple[int, int]:
    """Returns as many rows and columns in all as this share of either makes."""
    rows, columns = forms.matrix_shape(shape)
    k1, k2 = max(1, int(rows * ratio)), max(1, int(columns * ratio))
    kernel = math.prod(shape[2:])
    if kernel > 1:
        most = _MOST_CHANNELS * kernel
        few = ratio == 1 or k2 < most
        return (k1, k2) if few else (min(rows, k1 * k2 // most), most)
    if ratio == 1 or min(k1, k2) <= _MOST_OF_SHORTER:
        return k1, k2
    short = k1 * k2 // max(rows, columns)
    short = min(short, _MOST_OF_SHORTER)
    short = short if short >= _LEAST_OF_SHORTER else _FEW_OF_SHORTER
    long = min(max(rows, columns), k1 * k2 // short)
    return (long, short) if columns <= rows else (short, long)


def _fold(count: int, kept: int, seed: str, like: torch.Tensor) -> Fold | None:
    """Returns a fold of ``count`` numbers with random signs; None if all stay."""
    if kept >= count:
        return None
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
    bits = torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8)
    signs, matrix = (2 * bits - 1).to(like.dtype), None
    if kept <= _MOST_BY_PRODUCT or count * kept <= _LARGEST_MATRIX:
        matrix = torch.eye(kept, dtype=like.dtype).repeat(1, -(-count // kept))
        matrix = (matrix[:, :count] * signs).to(like.device)
    return Fold(signs.to(like.device), kept, matrix)


def _project(use: forms.Contribution, folds: Folds, budget: int) -> torch.Tensor:
    """Returns ``P G Qᵀ`` of every sample's gradient of one use, ``(N, k1 k2)``."""
    if folds.channels is not None:
        use = _fewer_channels(use, folds.channels, folds.kernel)
    like = forms.float_factor(use)
    if isinstance(use, forms.Dense) and folds.num_columns == 1:
        return _along(like.flatten(1), folds.rows, 1)
    (p, q), (k1, k2) = folds[3:5], folds.kept
    elements = use.positions * (k1 + k2)
    if isinstance(use, forms.Windows):
        elements = forms.unfolded(use) * use.width
        budget = min(budget, _CACHE) if traits(like).is_host else budget
    elements += p * q if isinstance(use, forms.Dense) else min(p * k2, k1 * q)
    size = max(1, budget // (elements * like.dtype.itemsize))
    found = [
        _project_part(forms.part(use, *interval), folds)
        for interval in forms.chunks(len(like), size)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _fewer_channels(
    use: forms.Contribution, channels: Fold, kernel: int
) -> forms.Contribution:
    """Returns a use with its input channels folded."""

    def folded(values: torch.Tensor) -> torch.Tensor:
        by_channel = values.unflatten(-1, (-1, kernel))
        return channels.along(by_channel, values.dim() - 1).flatten(-2)

    match use:
        case forms.Windows(left, source):
            by_group = source.to(left.dtype).unflatten(1, (use.groups, -1)).flatten(3)
            fewer = channels.along(by_group, 2).flatten(1, 2)
            fewer = fewer.unflatten(2, source.shape[2:])
            return dataclasses.replace(use, source=fewer)
        case forms.Outer(left, right):
            return forms.Outer(left, folded(right))
        case forms.Lookup(_, values) | forms.Dense(values):
            return dataclasses.replace(use, values=folded(values.flatten(2)))


def _project_part(part: forms.Part, folds: Folds) -> torch.Tensor:
    match part:
        case forms.Dense(values):
            matrix = values.reshape(-1, folds.num_rows, folds.num_columns)
            matrix = _along(matrix, folds.rows, 1)
            matrix = _along(matrix, folds.columns, 2)
        case forms.Lookup(index, values):
            values, places = _along(values, folds.columns, 2), index.long()
            if folds.rows is not None:
                signs = folds.rows.signs.index_select(0, places.flatten())
                values = values * signs.view(*index.shape, 1)
                places = places % folds.rows.kept
            matrix = values.new_zeros(len(values), *folds.kept)
            places = places.unsqueeze(2).expand_as(values)
            matrix = matrix.scatter_add(1, places, values)
        case forms.Outer(left, right):
            matrix = _project_outer(left, right, folds)
    k1, k2 = folds.kept
    is_folded = (folds.channels or folds.columns) is not None
    # Numbers of the longer side are next to one another.
    return (matrix.transpose(1, 2) if is_folded and k2 < k1 else matrix).flatten(1)


def _project_outer(
    left: torch.Tensor, right: torch.Tensor, folds: Folds
) -> torch.Tensor:
    """Returns the projections of outer products, ``(N, k1, k2)``.

    Rows of several groups are folded last, since each group has its own.
    """
    # (N, G, p, T): convolutions have their positions last already.
    left, right = left.transpose(2, 3), _along(right, folds.columns, 3)
    groups = left.shape[1]
    if groups == 1:
        left = _along(left, folds.rows, 2)
    if left.shape[2] <= right.shape[3]:
        matrix = left @ right
    else:  # faster in this order on a CPU
        matrix = (right.transpose(2, 3) @ left.transpose(2, 3)).transpose(2, 3)
    matrix = matrix.flatten(1, 2)
    return matrix if groups == 1 else _along(matrix, folds.rows, 1)


def _along(values: torch.Tensor, fold: Fold | None, dim: int) -> torch.Tensor:
    return values if fold is None else fold.along(values, dim)
