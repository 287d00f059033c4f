"""The four forms in which one use of a parameter adds to every sample's gradient.

A parameter of shape ``(r, ...)`` is a matrix of r rows and c columns, where
``c = numel / r``; all forms agree on that view, so that uses of one parameter by
different layers can be combined.

Axes: N rows of the batch (samples, or k consecutive rows for each), G groups, T
positions, p rows and q columns of one group (``G p = r``, ``q = c``), V entries of a
table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from per_sample_grad.errors import PerSampleError
from xla_replica import full_matmul_precision


@dataclasses.dataclass(frozen=True)
class _Grouped:
    """What `Outer` and `Windows` share: the left factor, ``(N, G, T, p)``."""

    left: torch.Tensor

    @property
    def groups(self) -> int:
        return self.left.shape[1]

    @property
    def positions(self) -> int:
        """T, the number of outer products that are added."""
        return self.left.shape[2]


@dataclasses.dataclass(frozen=True)
class Outer(_Grouped):
    """A sum of T outer products in each of G groups of rows.

    ``g_n[h p + i, j] = Σ_t left[n, h, t, i] · right[n, h, t, j]``.

    Attributes:
        left: ``(N, G, T, p)``, any float dtype.
        right: ``(N, G, T, q)``, any float dtype.
    """

    right: torch.Tensor

    @property
    def width(self) -> int:
        """q, the columns of the right factor."""
        return self.right.shape[3]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Rows added to a table: ``g_n[index[n, t]] += values[n, t]``.

    An `Outer` whose left factor is one-hot, without the one-hot.

    Attributes:
        index: ``(N, T)``, integers in ``[0, V)``.
        values: ``(N, T, q)``, any float dtype; zeros where nothing is added.
    """

    index: torch.Tensor
    values: torch.Tensor
    groups: ClassVar[int] = 1

    @property
    def positions(self) -> int:
        """T, the number of rows that are added."""
        return self.index.shape[1]

    @property
    def width(self) -> int:
        """q, the columns of the table."""
        return self.values.shape[2]


@dataclasses.dataclass(frozen=True)
class Dense:
    """The gradients themselves.

    Attributes:
        values: ``(N, *shape of the parameter)``, any float dtype.
    """

    values: torch.Tensor
    groups: ClassVar[int] = 1
    positions: ClassVar[int] = 1


@dataclasses.dataclass(frozen=True)
class Windows(_Grouped):
    """An `Outer` whose right factor is unfolded when it is used, and not kept.

    What a convolution sees is ``K`` times as large as its input (K is the kernel's
    size): held for every layer, that would be most of the memory.

    Attributes:
        left: ``(N, G, T, p)``, any float dtype.
        source: ``(N k, C, *S)``: k consecutive rows for each of N samples.
        unfold: Maps ``(n k, C', *S)`` to ``(n k, G, T / k, C' K / G)``, for any
            number of rows and any C' channels, the same number from each group.
        kernel: K.
        rows: k.
    """

    source: torch.Tensor
    unfold: Callable[[torch.Tensor], torch.Tensor]
    kernel: int
    rows: int = 1

    @property
    def width(self) -> int:
        """q, the columns of the right factor."""
        return self.source.shape[1] // self.groups * self.kernel

    def outer(self, start: int, stop: int) -> Outer:
        """Returns samples ``[start, stop)``, unfolded."""
        source = self.source[start * self.rows : stop * self.rows]
        right = self.unfold(source.to(self.left.dtype))
        return Outer(self.left[start:stop], _joined(right, stop - start))


# What is unfolded.
Part = Outer | Lookup | Dense
Contribution = Part | Windows


def unfolded(contribution: Contribution) -> int:
    """Returns how many numbers one column of a sample's unfolded factor has."""
    is_unfolded = isinstance(contribution, Windows)
    return contribution.groups * contribution.positions if is_unfolded else 0


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of a parameter of this shape, seen as a matrix.

    >>> matrix_shape((8, 3, 5, 5)), matrix_shape((7,)), matrix_shape(())
    ((8, 75), (7, 1), (1, 1))
    """
    rows = shape[0] if len(shape) else 1
    return rows, math.prod(shape[1:])


@functools.cache
def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums: the widest of these dtypes, and at least float32."""
    floats = (d for d in dtypes if d.is_floating_point or d.is_complex)
    return functools.reduce(torch.promote_types, floats, torch.float32)


def full_precision(
    device: torch.device, products: bool = True, of_bfloat16: bool = False
) -> contextlib.AbstractContextManager[object]:
    """Returns a context without a graph and without the caller's autocast.

    In it ``products`` keep all their digits, those that factors in bfloat16 have, or
    else have training's precision.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if products:
            stack.enter_context(full_matmul_precision(device, of_bfloat16=of_bfloat16))
        return stack.pop_all()  # if one cannot be entered, none stays


def widened(contribution: Contribution) -> Contribution:
    """Returns both factors in their common `accumulation_dtype`, without a graph.

    The source of `Windows` keeps its dtype until it is unfolded.
    """
    fields = vars(contribution).items()
    tensors = [(n, value) for n, value in fields if isinstance(value, torch.Tensor)]
    dtype = accumulation_dtype(*[tensor.dtype for _, tensor in tensors])
    changed: dict[str, Any] = {}
    for name, tensor in tensors:
        if tensor.requires_grad:
            changed[name] = tensor = tensor.detach()
        if tensor.dtype != dtype and tensor.is_floating_point() and name != "source":
            changed[name] = tensor.to(dtype)
    if isinstance(contribution, Dense) and contribution.values.dim() == 1:
        # The gradient of a single number is a row of one number.
        changed["values"] = changed.get("values", contribution.values).unsqueeze(1)
    return dataclasses.replace(contribution, **changed) if changed else contribution


def mapped(contribution: Part, function: Callable[[torch.Tensor], Any]) -> Part:
    """Returns it with a function applied to all its floats."""
    tensors = tensors_of(contribution).items()
    changed = {n: function(each) for n, each in tensors if each.is_floating_point()}
    return dataclasses.replace(contribution, **changed)


def multiplied(contribution: Contribution, number: float) -> Contribution:
    """Returns what contributes ``number`` times as much."""
    if number == 1:
        return contribution
    name = "left" if isinstance(contribution, _Grouped) else "values"
    changed: Any = {name: float_factor(contribution) * number}
    return dataclasses.replace(contribution, **changed)


def tensors_of(contribution: Contribution) -> dict[str, torch.Tensor]:
    """Returns the tensors that it holds, by the names of their fields."""
    return {n: v for n, v in vars(contribution).items() if isinstance(v, torch.Tensor)}


class Versions:
    """How often tensors, and those of contributions, had been changed in place by now.

    Contributions may hold the caller's own tensors, such as a model's input, and
    gradients that are on their way through a backward pass.

    Attributes:
        seen: The tensors, each with its version.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], uses: Iterable[Contribution] = ()
    ) -> None:
        values = [value for use in uses for value in vars(use).values()]
        held = [each for each in values if isinstance(each, torch.Tensor)]
        self.seen = [(each, each._version) for each in (*tensors, *held)]

    def refuse_changes(self, text: str, of: object = "") -> None:
        """Raises PerSampleError if any was changed since, with ``text.format(of)``."""
        if any(tensor._version != version for tensor, version in self.seen):
            raise PerSampleError(text.format(of))


def regroup(contribution: Contribution, num_samples: int) -> Contribution:
    """Returns N rows as B samples, each of k = N / B consecutive rows.

    A layer that is applied to a folded batch (``x.flatten(0, 1)``) needs this: a
    sample's gradient is the sum over its rows, so positions are joined and gradients
    are added.
    """
    if len(float_factor(contribution)) == num_samples:
        return contribution
    match contribution:
        case Outer(left, right):
            return Outer(_joined(left, num_samples), _joined(right, num_samples))
        case Windows(left, source):
            left, rows = _joined(left, num_samples), source.shape[0] // num_samples
            return dataclasses.replace(contribution, left=left, rows=rows)
        case Lookup(index, values):
            values = values.reshape(num_samples, -1, values.shape[-1])
            return Lookup(index.reshape(num_samples, -1), values)
        case Dense(values):
            return Dense(values.unflatten(0, (num_samples, -1)).sum(1))


def _joined(factor: torch.Tensor, num_samples: int) -> torch.Tensor:
    if factor.shape[0] == num_samples:
        return factor
    rows = factor.unflatten(0, (num_samples, -1)).transpose(1, 2)
    return torch.flatten(rows, 2, 3)


def merge(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Returns the uses of one parameter with those of one form joined.

    The outer products of several uses are the positions of one longer use, which has
    the cross terms between the uses too. `Outer` counts as a form for each number of
    groups; `Windows` stay apart, since joining them would unfold them.
    """
    alike: dict[tuple[type, int], list[Contribution]] = {}
    for number, use in enumerate(contributions):
        key = number if isinstance(use, Windows) else use.groups
        alike.setdefault((type(use), key), []).append(use)
    return [_merged(uses) for uses in alike.values()]


def _merged(uses: list[Any]) -> Any:
    if len(uses) == 1:
        return uses[0]
    kind = type(uses[0])
    if kind is Dense:
        return Dense(summed(use.values for use in uses))
    fields = zip(*[tensors_of(use).values() for use in uses])
    return kind(*[torch.cat(each, 2 if kind is Outer else 1) for each in fields])


def summed(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of one or more tensors, added one after the other."""
    return functools.reduce(operator.add, terms)


def num_rows(contribution: Contribution) -> int:
    return len(float_factor(contribution))


def float_factor(contribution: Contribution) -> torch.Tensor:
    """Returns the factor whose dtype and device are those of the gradients."""
    match contribution:
        case Outer(left) | Windows(left):
            return left
        case Lookup(_, values) | Dense(values):
            return values


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields intervals of ``size`` numbers that make up ``[0, total)``."""
    for start in range(0, total, size):
        yield start, min(start + size, total)


def part(contribution: Contribution, start: int, stop: int) -> Part:
    """Returns samples ``[start, stop)``, unfolded."""
    if isinstance(contribution, Windows):
        return contribution.outer(start, stop)
    if start == 0 and stop == len(float_factor(contribution)):
        return contribution
    tensors = tensors_of(contribution).items()
    return type(contribution)(**{name: value[start:stop] for name, value in tensors})


def columns(contribution: Contribution, first: int, last: int) -> Contribution:
    """Returns what contributes to columns ``[first, last)`` of the matrix.

    For `Windows` both are multiples of K.
    """
    match contribution:
        case Outer(left, right):
            return Outer(left, right[..., first:last])
        case Windows():
            channels = slice(first // contribution.kernel, last // contribution.kernel)
            by_group = contribution.source.unflatten(1, (contribution.groups, -1))
            source = by_group[:, :, channels].flatten(1, 2)
            return dataclasses.replace(contribution, source=source)
        case Lookup(index, values):
            return Lookup(index, values[..., first:last])
        case Dense(values):
            return Dense(values.reshape(*values.shape[:2], -1)[..., first:last])
