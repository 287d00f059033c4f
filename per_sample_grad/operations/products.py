"""Products of matrices of which one is computed from parameters alone.

The other matrix has rows of samples. Its factors are the gradient's: no sample's
gradient is formed. Functions such as `torch.matmul` and `torch.einsum` fold several
dimensions into the rows, and unfold them in the next operation, from which it is known
which rows are those of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution, Dense, Outer
from per_sample_grad.operations import rules

# By the name of the node: of the input that is computed from parameters, the dimension
# of the output that counts the other one's rows.
PRODUCTS: dict[str, dict[int, int]] = {
    "MmBackward0": {0: 1, 1: 0},
    "AddmmBackward0": {1: 1, 2: 0},
    "BmmBackward0": {0: 2, 1: 1},
    "MvBackward0": {1: 0},
}
_BIAS = ("AddmmBackward0", 0)  # what is added, and has no row for each sample
_RESHAPES = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")

Consumers = Mapping[Node, Sequence[tuple[Node | int, int]]]


class Rows(NamedTuple):
    """Which rows of a product belong to which sample.

    Attributes:
        axis: The dimension of the product that counts them.
        before: It counts ``(before, rows of samples, after)`` numbers; consecutive rows
            of a sample are among the second.
        after: See there.
    """

    axis: int
    before: int
    after: int


def rows_of(
    node: Node, consumers: Consumers, num_samples: int, batch_dim: int
) -> Rows | None:
    """Returns where samples are in the output of a product; None if nowhere.

    ``batch_dim`` is the dimension that counts samples where the output's dimensions are
    unfolded.
    """
    if num_samples == 1:  # which all rows belong to
        return Rows(min(PRODUCTS[node.name()].values()), 1, 1)
    shape = rules.output_shape(node)
    layout: list[tuple[Rows, int]] | None
    layout = [(Rows(axis, 1, 1), size) for axis, size in enumerate(shape)]
    # torch.einsum brings dimensions into their order after it has unfolded them.
    order = None
    taker = _only_taker(node, consumers)
    if taker is not None and taker.name() in _RESHAPES:
        layout = _unfolded(shape, rules.output_shape(taker))
        if node.name() == "BmmBackward0":
            order = _order_in(_only_taker(taker, consumers))
    elif len(shape) == 2:
        order = _order_in(taker)
    if layout is not None and order is not None:
        layout = [layout[dim] for dim in order]
    if layout is None or not -len(layout) <= batch_dim < len(layout):
        return None
    rows, size = layout[batch_dim]
    return rows if size and size % num_samples == 0 else None


def _order_in(taker: Node | None) -> tuple[int, ...] | None:
    return None if taker is None else rules.order_of(taker)


def _only_taker(node: Node, consumers: Consumers) -> Node | None:
    takers = [taker for taker, _ in consumers.get(node, ())]
    if len(takers) == 1 and not isinstance(takers[0], int):
        return takers[0]
    return None


def _unfolded(
    shape: Sequence[int], view: Sequence[int]
) -> list[tuple[Rows, int]] | None:
    """Returns which part of which dimension each of a view's is, and its size.

    None where a dimension of the view is a part of several.
    """
    found = []
    axis, before = 0, 1
    for size in view:
        while axis < len(shape) - 1 and before == shape[axis] and size != 1:
            axis, before = axis + 1, 1
        left = shape[axis] // before
        if not size or left % size:
            return None
        found.append((Rows(axis, before, left // size), size))
        before *= size
    return found


def meets_samples(node: Node, slot: int, rows: Rows | None) -> bool:
    """Returns whether the input at ``slot`` meets rows of samples in a product."""
    if rows is None:
        return False
    if (node.name(), slot) == _BIAS:
        output, own = rules.output_shape(node), rules.source_shape(node, slot)
        return rules.aligned(own, output)[rows.axis] == 1
    return PRODUCTS[node.name()].get(slot) == rows.axis


def contribution(node: Node, slot: int, grad: torch.Tensor, rows: Rows) -> Contribution:
    """Returns what samples contribute to one input of a product.

    Args:
        node: The product.
        slot: The input.
        grad: The gradient of the output, with its rows as the first dimension.
        rows: Which of them belong to which sample.
    """
    name = node.name()
    if (name, slot) == _BIAS:
        values = rules.summed_to_source(grad, node, slot, rows.axis).values
        if rows.before != 1 or rows.after != 1:
            values = values.unflatten(0, (rows.before, -1, rows.after)).sum((0, 2))
        return forms.multiplied(Dense(values), float(rules.saved(node, "beta")))
    if name == "MvBackward0":
        left, right = (
            _by_sample(each.unsqueeze(0), rows)
            for each in (grad.unsqueeze(1), rules.saved(node, "self"))
        )
        return Dense((left.transpose(2, 3) @ right).flatten(1))
    names = ("mat1", "mat2") if name == "AddmmBackward0" else ("self", "mat2")
    on_the_left = rows.axis == max(PRODUCTS[name].values())
    other = rules.saved(node, names[1 if on_the_left else 0])
    if on_the_left:  # its columns are the rows of samples
        other = other.transpose(-1, -2)
    # Both are (groups, rows, *), without the groups where there is one matrix alone.
    grad = grad.unsqueeze(0) if grad.dim() == 2 else grad.transpose(0, 1)
    other = other.unsqueeze(0) if other.dim() == 2 else other
    factors = [_by_sample(each, rows) for each in (other, grad)]
    found = Outer(*(reversed(factors) if on_the_left else factors))
    if name == "AddmmBackward0":
        return forms.multiplied(found, float(rules.saved(node, "alpha")))
    return found


def _by_sample(matrices: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Returns ``(G, R, p)`` as ``(N, G, T, p)``, where R rows are N times T."""
    if len(matrices) == rows.before == rows.after == 1:
        return matrices[0].unsqueeze(1).unsqueeze(1)
    cut = matrices.unflatten(1, (rows.before, -1, rows.after))
    return cut.permute(2, 0, 1, 3, 4).flatten(2, 3)
