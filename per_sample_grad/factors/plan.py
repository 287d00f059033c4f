"""Which form each parameter's products are computed in: static shapes decide.

The factored form costs ``2 N G T² (p + q + 1)`` flops for norms and N times that for a
Gram matrix; forming the gradients costs ``2 N G T p q`` and then little (Li et al.,
arXiv:2110.05679; Bu et al., arXiv:2205.10683, who switch on memory). Either is done
for as many samples and columns at a time as fit a byte budget: memory does not decide.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from per_sample_grad.factors.forms import (
    Contribution,
    Dense,
    Lookup,
    Outer,
    Windows,
    dtype_of,
    elements_for_gradients,
    matrix_shape,
    unfolded_elements,
)
from per_sample_grad.factors.products import has_product

Quantity = Literal["norms", "gram"]
Method = Literal["auto", "factored", "materialized"]

QUANTITIES: tuple[Quantity, ...] = ("norms", "gram")
METHODS: tuple[Method, ...] = ("auto", "factored", "materialized")
# Bytes of temporary tensors where nobody says how many: this part of what the forward
# pass recorded, between two bounds. On a CPU chunks that fit its caches are the
# fastest; elsewhere every chunk is a launch, or a piece of a program to compile.
SHARE_OF_RECORDED = 2
LARGEST_BUDGET = 256 * 2**20
SMALLEST_BUDGETS = {"cpu": 2**20}
SMALLEST_BUDGET = 64 * 2**20
# Reading or writing a number costs as much as so many flops.
FLOPS_PER_ELEMENT = 8


@dataclasses.dataclass(frozen=True)
class Choice:
    """How one parameter's share of a quantity is computed.

    Attributes:
        form: ``"dense"``, ``"factored"`` or ``"materialized"``.
        samples: At a time.
        columns: Of the gradient as a matrix, at a time; all of them if factored.
        num_chunks: How many times.
        flops: Floating-point operations, 2 for a multiplication and addition.
        bytes: Of all temporaries that are there at once.
    """

    form: Literal["dense", "factored", "materialized"]
    samples: int
    columns: int
    num_chunks: int
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The choices for one quantity; `str` is a table for people."""

    quantity: Quantity
    choices: Mapping[str, Choice]

    def __str__(self) -> str:
        width = max((len(name) for name in self.choices), default=0)
        lines = [f"plan for {self.quantity}:"]
        for name, choice in self.choices.items():
            lines.append(
                f"  {name:<{width}}  {choice.form:<12}  {choice.num_chunks:>4} x "
                f"({choice.samples} samples, {choice.columns} columns) "
                f"{choice.flops / 1e6:>12.3f} Mflop {choice.bytes / 2**20:>10.3f} MiB"
            )
        flops = sum(choice.flops for choice in self.choices.values())
        peak = max((choice.bytes for choice in self.choices.values()), default=0)
        lines.append(
            f"  {'total':<{width}}  {flops / 1e6:.3f} Mflop, most temporaries "
            f"{peak / 2**20:.3f} MiB"
        )
        return "\n".join(lines)


def default_budget(recorded: int, device: str) -> int:
    """Bytes of temporaries beside ``recorded`` bytes of activations."""
    smallest = SMALLEST_BUDGETS.get(device, SMALLEST_BUDGET)
    return min(LARGEST_BUDGET, max(smallest, recorded // SHARE_OF_RECORDED))


def choose(
    quantity: Quantity,
    contributions: Sequence[Contribution],
    shape: Sequence[int],
    *,
    num_samples: int,
    budget: int,
    num_other: int | None = None,
    other: Sequence[Contribution] | None = None,
    method: Method = "auto",
) -> Choice:
    """The cheaper form of one parameter's share, in chunks that fit the budget.

    Args:
        quantity: ``"norms"`` or ``"gram"``.
        contributions: Merged uses of the parameter.
        shape: Of the parameter.
        num_samples: B.
        budget: Bytes of all temporaries; a single sample or column may exceed it.
        num_other: Samples of the other batch of a Gram matrix; B without one.
        other: Merged uses in the other batch.
        method: ``"auto"``, or a form to prefer where it exists.
    """
    distinct = other is not None and other is not contributions
    other = contributions if other is None else other
    partners = 1 if quantity == "norms" else (num_other or num_samples)
    rows, columns = matrix_shape(shape)
    if all(isinstance(c, Dense) for c in (*contributions, *other)):
        flops = 2 * num_samples * partners * rows * columns
        return Choice("dense", num_samples, columns, 1, flops, 0)
    blocks = 2 if distinct and quantity == "gram" else 1
    formed = _materialized(contributions, shape, num_samples, partners, blocks, budget)
    if not all(has_product(a, b) for a in contributions for b in other):
        return formed[0]
    factored = _factored(contributions, other, num_samples, partners, columns, budget)
    if method == "auto":
        return min((factored, formed), key=lambda pair: pair[1])[0]
    return factored[0] if method == "factored" else formed[0]


def samples_of_gradients(
    contributions: Sequence[Contribution], columns: int, num_samples: int, budget: int
) -> int:
    """Samples at a time, beside the gradients that are asked for."""
    if not any(unfolded_elements(c) for c in contributions):
        return num_samples
    samples = num_samples
    itemsize = dtype_of(contributions[0]).itemsize
    each = max(elements_for_gradients(c, columns) for c in contributions) * itemsize
    while samples > 1 and samples * each > budget:
        samples = -(-samples // 2)
    return samples


def _materialized(
    contributions: Sequence[Contribution],
    shape: Sequence[int],
    num_samples: int,
    partners: int,
    blocks: int,
    budget: int,
) -> tuple[Choice, int]:
    rows, all_columns = matrix_shape(shape)
    size = rows * all_columns
    flops = 2 * num_samples * partners * size
    for c in contributions:
        match c:
            case Outer() | Windows():
                flops += 2 * num_samples * c.positions * size
            case Lookup():
                flops += num_samples * c.positions * all_columns
    itemsize = dtype_of(contributions[0]).itemsize
    # Of several uses, the sum so far and the sum to be.
    sums = rows * (1 if len(contributions) == 1 else 3)
    # And those of all samples.
    of_all = blocks * num_samples * rows if partners > 1 else 0

    def on_the_way(samples: int, columns: int) -> int:
        return samples * max(elements_for_gradients(c, columns) for c in contributions)

    def size_of(samples: int, columns: int) -> int:
        sums_and_all = columns * (samples * sums + of_all)
        return (on_the_way(samples, columns) + sums_and_all) * itemsize

    units = [c.unit for c in contributions if isinstance(c, Windows)]
    unit = math.lcm(*units)
    samples, columns = num_samples, all_columns
    if partners > 1 and not units:
        while columns > unit and size_of(samples, columns) > budget:
            columns = _half(columns, unit)
    while samples > 1 and size_of(samples, columns) > budget:
        if on_the_way(samples, columns) < columns * of_all:
            break  # the rest is the gradients' of all samples
        samples = -(-samples // 2)
    while columns > unit and size_of(samples, columns) > budget:
        columns = _half(columns, unit)
    while samples > 1 and size_of(samples, columns) > budget:
        if 8 * on_the_way(samples, columns) < columns * of_all:
            break  # fewer at a time would not help
        samples = -(-samples // 2)
    times = -(-all_columns // max(columns, 1)) * -(-num_samples // samples)
    choice = Choice(
        "materialized", samples, columns, times, flops, size_of(samples, columns)
    )
    return choice, flops + 2 * FLOPS_PER_ELEMENT * num_samples * size


def _half(columns: int, unit: int) -> int:
    return max(unit, -(-columns // (2 * unit)) * unit)


def _factored(
    contributions: Sequence[Contribution],
    other: Sequence[Contribution],
    num_samples: int,
    partners: int,
    columns: int,
    budget: int,
) -> tuple[Choice, int]:
    flops, largest, elements = 0, 1, 0
    for a in contributions:
        for b in other:
            pairs = _positions(a) * _positions(b)
            match a, b:
                case (Outer() | Windows(), Outer() | Windows()):
                    inner = a.left.shape[3] + _width(a) + 1
                    pairs *= a.groups
                case (Outer() | Windows() | Lookup(), Outer() | Windows() | Lookup()):
                    inner = _width(a) + 2
                case _:
                    inner = 0
            flops += 2 * num_samples * partners * pairs * inner
            largest = max(largest, 3 * pairs)
            elements += 3 * pairs * partners * num_samples
    itemsize = dtype_of(contributions[0]).itemsize
    unfolded = sum(unfolded_elements(c) for c in contributions)
    if partners > 1:
        unfolded += sum(unfolded_elements(c) for c in other)

    def size_of(samples: int) -> int:
        of_others = min(samples, partners)
        return samples * (largest * of_others + unfolded) * itemsize

    samples = max(num_samples, partners)
    while samples > 1 and size_of(samples) > budget:
        samples = -(-samples // 2)
    times = -(-num_samples // samples) * -(-partners // samples)
    choice = Choice("factored", samples, columns, times, flops, size_of(samples))
    return choice, flops + FLOPS_PER_ELEMENT * elements


def _positions(contribution: Contribution) -> int:
    return 1 if isinstance(contribution, Dense) else contribution.positions


def _width(contribution: Contribution) -> int:
    match contribution:
        case Outer(_, right):
            return right.shape[3]
        case Windows():
            return contribution.width
        case Lookup(_, values):
            return values.shape[2]
        case Dense(values):
            return values[0].numel()
