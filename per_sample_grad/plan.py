"""Which form each parameter's products are computed in: static shapes decide.

The factored form costs ``2 N G T² (p + q + 1)`` flops for norms and N times that for a
Gram matrix; forming the gradients costs ``2 N G T p q`` and then little (Li et al.,
arXiv:2110.05679; Bu et al., arXiv:2205.10683, who switch on memory). Gradients are
formed some columns at a time, so that memory does not decide: the byte budget does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from per_sample_grad.contributions import (
    Contribution,
    Dense,
    Lookup,
    Outer,
    matrix_shape,
)
from per_sample_grad.products import has_product

Quantity = Literal["norms", "gram"]
Method = Literal["auto", "factored", "materialized"]

QUANTITIES: tuple[Quantity, ...] = ("norms", "gram")
METHODS: tuple[Method, ...] = ("auto", "factored", "materialized")
# Bytes of temporary tensors per parameter that a plan may use.
DEFAULT_BUDGET = 256 * 2**20
# Reading or writing a number costs as much as so many flops.
FLOPS_PER_ELEMENT = 8


@dataclasses.dataclass(frozen=True)
class Choice:
    """How one parameter's share of a quantity is computed.

    Attributes:
        form: ``"dense"``, ``"factored"`` or ``"materialized"``.
        chunk: Samples (factored) or columns (materialized) at a time.
        num_chunks: How many times.
        flops: Floating-point operations, 2 for a multiplication and addition.
        bytes: Size of the largest temporary.
    """

    form: Literal["dense", "factored", "materialized"]
    chunk: int
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
                f"{choice.chunk:<6} {choice.flops / 1e6:>12.3f} Mflop "
                f"{choice.bytes / 2**20:>10.3f} MiB"
            )
        flops = sum(choice.flops for choice in self.choices.values())
        peak = max((choice.bytes for choice in self.choices.values()), default=0)
        lines.append(
            f"  {'total':<{width}}  {flops / 1e6:.3f} Mflop, largest temporary "
            f"{peak / 2**20:.3f} MiB"
        )
        return "\n".join(lines)


def choose(
    quantity: Quantity,
    contributions: Sequence[Contribution],
    shape: Sequence[int],
    *,
    num_samples: int,
    num_other: int | None = None,
    other: Sequence[Contribution] | None = None,
    method: Method = "auto",
    budget: int = DEFAULT_BUDGET,
) -> Choice:
    """The cheaper form of one parameter's share, in chunks that fit the budget.

    Args:
        quantity: ``"norms"`` or ``"gram"``.
        contributions: Merged uses of the parameter.
        shape: Of the parameter.
        num_samples: B.
        num_other: Samples of the other batch of a Gram matrix; B without one.
        other: Merged uses in the other batch.
        method: ``"auto"``, or a form to prefer where it exists.
        budget: Bytes a temporary may have; a single sample or column may exceed it.
    """
    other = contributions if other is None else other
    partners = 1 if quantity == "norms" else (num_other or num_samples)
    if all(isinstance(c, Dense) for c in (*contributions, *other)):
        size = matrix_shape(shape)[0] * matrix_shape(shape)[1]
        flops = 2 * num_samples * partners * size
        return Choice("dense", num_samples, 1, flops, 0)
    formed = _materialized(contributions, shape, num_samples, partners, budget)
    if not all(has_product(a, b) for a in contributions for b in other):
        return formed[0]
    factored = _factored(contributions, other, num_samples, partners, budget)
    if method == "auto":
        return min((factored, formed), key=lambda pair: pair[1])[0]
    return factored[0] if method == "factored" else formed[0]


def _materialized(
    contributions: Sequence[Contribution],
    shape: Sequence[int],
    num_samples: int,
    partners: int,
    budget: int,
) -> tuple[Choice, int]:
    rows, columns = matrix_shape(shape)
    size = rows * columns
    flops = 2 * num_samples * partners * size
    for c in contributions:
        match c:
            case Outer():
                flops += 2 * num_samples * c.positions * size
            case Lookup():
                flops += num_samples * c.positions * columns
    itemsize = _itemsize(contributions)
    samples = num_samples + (partners if partners > 1 else 0)
    column_bytes = samples * rows * itemsize
    chunk = max(1, min(columns, budget // max(column_bytes, 1)))
    num_chunks = -(-columns // chunk)
    choice = Choice("materialized", chunk, num_chunks, flops, chunk * column_bytes)
    return choice, flops + 2 * FLOPS_PER_ELEMENT * num_samples * size


def _factored(
    contributions: Sequence[Contribution],
    other: Sequence[Contribution],
    num_samples: int,
    partners: int,
    budget: int,
) -> tuple[Choice, int]:
    flops, largest, elements = 0, 1, 0
    for a in contributions:
        for b in other:
            pairs = _positions(a) * _positions(b)
            match a, b:
                case Outer(), Outer():
                    inner = a.left.shape[3] + a.right.shape[3] + 1
                    pairs *= a.groups
                case (Outer() | Lookup(), Outer() | Lookup()):
                    inner = _width(a) + 2
                case _:
                    inner = 0
            flops += 2 * num_samples * partners * pairs * inner
            largest = max(largest, 3 * pairs * partners)
            elements += 3 * pairs * partners * num_samples
    itemsize = _itemsize(contributions)
    chunk = max(1, min(num_samples, budget // (largest * itemsize)))
    num_chunks = -(-num_samples // chunk)
    choice = Choice("factored", chunk, num_chunks, flops, chunk * largest * itemsize)
    return choice, flops + FLOPS_PER_ELEMENT * elements


def _positions(contribution: Contribution) -> int:
    return 1 if isinstance(contribution, Dense) else contribution.positions


def _width(contribution: Contribution) -> int:
    match contribution:
        case Outer(_, right):
            return right.shape[3]
        case Lookup(_, values):
            return values.shape[2]
        case Dense(values):
            return values[0].numel()


def _itemsize(contributions: Sequence[Contribution]) -> int:
    match contributions[0]:
        case Outer(left, _):
            return left.element_size()
        case Lookup(_, values) | Dense(values):
            return values.element_size()
