"""How one use of a parameter contributes to every sample's gradient.

Four forms. A parameter of shape ``(r, ...)`` is a matrix of r rows and c columns,
``c = numel / r``; all forms agree on that view, so that uses of one parameter by
different layers can be combined.

Axes: N rows of the batch (samples, or k consecutive rows for each), G groups, T
positions, p rows and q columns of one group (``G p = r``, ``q = c``), V entries of a
table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch

# Devices where what is written one operation at a time is compiled into one, and a
# strided view is an operation on the host.
LAZY = ("xla",)


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


@dataclasses.dataclass(frozen=True)
class Windows:
    """An `Outer` whose right factor is unfolded when it is used, and not kept.

    What a convolution sees is ``K`` times as large as its input (K the kernel's size):
    held for every layer, that would be most of the memory.

    Attributes:
        left: ``(N, G, T, p)``, any float dtype.
        source: ``(N k, C, *S)``: k consecutive rows for each of N samples.
        unfold: From ``(n k, C', *S)`` to ``(n k, G, T / k, C' K / G)``, for any
            number of rows and any C' channels, as many of each group.
        kernel: K.
        rows: k.
        direct: From both factors, of any number of samples with ``k = 1``, to their
            gradients ``(n, r, C' K / G)``, where there is a faster way than unfolding.
        direct_channels: C' must be G times a multiple of it.
        direct_elements: Numbers that a sample takes on that way, beside its gradient:
            of each channel of the source, and of the left factor.
    """

    left: torch.Tensor
    source: torch.Tensor
    unfold: Callable[[torch.Tensor], torch.Tensor]
    kernel: int
    rows: int = 1
    direct: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    direct_channels: int = 1
    direct_elements: tuple[int, int] = (0, 0)

    @property
    def unit(self) -> int:
        """Columns of the gradient that come together."""
        return self.kernel * (1 if self.direct is None else self.direct_channels)

    @property
    def groups(self) -> int:
        return self.left.shape[1]

    @property
    def positions(self) -> int:
        return self.left.shape[2]

    @property
    def width(self) -> int:
        """q, of the right factor."""
        return self.source.shape[1] // self.groups * self.kernel

    def outer(
        self, start: int, stop: int, first: int = 0, last: int | None = None
    ) -> Outer:
        """Samples ``[start, stop)``, columns ``[first, last)``: multiples of K."""
        right = self.unfold(self._source(start, stop, first, last))
        return Outer(self.left[start:stop], _joined(right, stop - start))

    def gradients(self, start: int, stop: int, first: int, last: int) -> torch.Tensor:
        """The same of the gradients: ``(n, r, last - first)``."""
        if self.direct is not None:
            source = self._source(start, stop, first, last)
            return self.direct(self.left[start:stop], source)
        outer = self.outer(start, stop, first, last)
        return (outer.left.transpose(2, 3) @ outer.right).flatten(1, 2)

    def _source(
        self, start: int, stop: int, first: int, last: int | None
    ) -> torch.Tensor:
        source = self.source[start * self.rows : stop * self.rows]
        if (first, last) not in ((0, None), (0, self.width)):
            last = self.width if last is None else last
            channels = slice(first // self.kernel, last // self.kernel)
            by_group = source.unflatten(1, (self.groups, -1))
            source = by_group[:, :, channels].flatten(1, 2)
        return source.to(self.left.dtype)


Contribution = Outer | Windows | Lookup | Dense


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


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """No graph, and whatever autocast the caller is in: not here."""
    if not torch.is_autocast_enabled(device.type):
        return torch.no_grad()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def widened(contribution: Contribution) -> Contribution:
    """Both factors in their common `accumulation_dtype`, outside any graph."""
    match contribution:
        case Outer(left, right):
            dtype = accumulation_dtype(left.dtype, right.dtype)
            return Outer(left.detach().to(dtype), right.detach().to(dtype))
        case Windows(left, source):
            dtype = accumulation_dtype(left.dtype, source.dtype)
            return dataclasses.replace(
                contribution, left=left.detach().to(dtype), source=source.detach()
            )
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
        case Windows(left, source):
            left, rows = _joined(left, num_samples), source.shape[0] // num_samples
            direct = contribution.direct if rows == 1 else None
            return dataclasses.replace(
                contribution, left=left, rows=rows, direct=direct
            )
        case Lookup(index, values):
            return Lookup(
                index.reshape(num_samples, -1),
                values.reshape(num_samples, -1, values.shape[-1]),
            )
        case Dense(values):
            if values.shape[0] == num_samples:
                return contribution
            return Dense(values.unflatten(0, (num_samples, -1)).sum(1))


def _joined(factor: torch.Tensor, num_samples: int) -> torch.Tensor:
    if factor.shape[0] == num_samples:
        return factor
    return factor.unflatten(0, (num_samples, -1)).transpose(1, 2).flatten(2, 3)


def merge(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Uses of one parameter, those of a form joined where that needs no copy of more.

    The outer products of several uses are the positions of one longer use; the cross
    terms between uses then come by themselves. (`Outer` counts as a form per number of
    groups; `Windows` stay apart, and have their cross terms with all.)
    """
    if len(contributions) == 1:
        return list(contributions)
    outers: dict[int, list[Outer]] = {}
    lookups: list[Lookup] = []
    denses: list[Dense] = []
    merged: list[Contribution] = []
    for contribution in contributions:
        match contribution:
            case Outer():
                outers.setdefault(contribution.groups, []).append(contribution)
            case Windows():
                merged.append(contribution)
            case Lookup():
                lookups.append(contribution)
            case Dense():
                denses.append(contribution)
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


def num_rows(contribution: Contribution) -> int:
    """N."""
    match contribution:
        case Outer(left) | Windows(left):
            return left.shape[0]
        case Lookup(index):
            return index.shape[0]
        case Dense(values):
            return values.shape[0]


def dtype_of(contribution: Contribution) -> torch.dtype:
    """Of the factors."""
    return _floats(contribution).dtype


def device_of(contribution: Contribution) -> torch.device:
    """Of the factors."""
    return _floats(contribution).device


def _floats(contribution: Contribution) -> torch.Tensor:
    match contribution:
        case Outer(left) | Windows(left):
            return left
        case Lookup(_, values) | Dense(values):
            return values


def held_elements(contribution: Contribution) -> int:
    """Numbers that are kept with it."""
    match contribution:
        case Outer(left, right) | Windows(left, right):
            return left.numel() + right.numel()
        case Lookup(index, values):
            return index.numel() + values.numel()
        case Dense(values):
            return values.numel()


def unfolded_elements(contribution: Contribution) -> int:
    """Numbers that one sample takes when it is unfolded: 0 where nothing is."""
    match contribution:
        case Windows():
            return contribution.groups * contribution.positions * contribution.width
    return 0


def elements_for_gradients(contribution: Contribution, columns: int) -> int:
    """Numbers that one sample takes on the way to so many columns of its gradient."""
    match contribution:
        case Windows(left) if contribution.direct is not None:
            of_channel, of_left = contribution.direct_elements
            channels = contribution.groups * columns // contribution.kernel
            gradient = contribution.groups * left.shape[3] * columns
            return (
                channels * of_channel + of_left + gradient
            )  # its blocks, joined later
        case Windows():
            return contribution.groups * contribution.positions * columns
    return 0


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Intervals of ``size`` numbers that make up ``[0, total)``."""
    for start in range(0, total, size):
        yield start, min(start + size, total)


def part(contribution: Contribution, start: int, stop: int) -> Outer | Lookup | Dense:
    """Samples ``[start, stop)``, unfolded."""
    match contribution:
        case Outer(left, right):
            return Outer(left[start:stop], right[start:stop])
        case Windows():
            return contribution.outer(start, stop)
        case Lookup(index, values):
            return Lookup(index[start:stop], values[start:stop])
        case Dense(values):
            return Dense(values[start:stop])
