"""Products of matrices of which one is computed from parameters alone.

The other matrix has rows of samples. Its factors are the gradient's: no sample's
gradient is formed. Functions such as `torch.matmul` and `torch.einsum` fold several
dimensions into the rows, and unfold them in the next operation, from which it is known
which rows are those of a sample.
"""

from __future__ import annotations

import math
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
    "LinearBackward0": {1: 0},  # TorchTPU's; of any dimensions but the last
}
# What is added, and has no row for each sample.
_BIASES = {("AddmmBackward0", 0), ("LinearBackward0", 2)}
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
    shape = view = rules.output_shape(node)
    taker = _only_taker(node, consumers)
    # torch.einsum brings dimensions into their order after it has unfolded them.
    if taker is not None and taker.name() in _RESHAPES:
        view = rules.output_shape(taker)
        is_einsum = node.name() == "BmmBackward0"
        taker = _only_taker(taker, consumers) if is_einsum else None
    elif len(shape) != 2:
        taker = None
    if not -len(view) <= batch_dim < len(view):
        return None
    order = None if taker is None else rules.order_of(taker)
    at = batch_dim % len(view) if order is None else order[batch_dim]
    size = view[at]
    return _within(shape, view, at) if size and size % num_samples == 0 else None


def _only_taker(node: Node, consumers: Consumers) -> Node | None:
    takers = [taker for taker, _ in consumers.get(node, ())]
    if len(takers) == 1 and not isinstance(takers[0], int):
        return takers[0]
    return None


def _within(shape: Sequence[int], view: Sequence[int], at: int) -> Rows | None:
    """Returns which part of which dimension that of a view is; None: of several."""
    outer, size, start = math.prod(view[:at]), view[at], 1
    for axis, count in enumerate(shape):
        if start * count > outer:
            before, rest = divmod(outer, start)
            if rest or count % (before * size):
                return None
            return Rows(axis, before, count // (before * size))
        start *= count
    return None


def meets_samples(node: Node, slot: int, rows: Rows | None) -> bool:
    """Returns whether the input at ``slot`` meets rows of samples in a product."""
    if rows is None:
        return False
    output = rules.output_shape(node)
    if (node.name(), slot) in _BIASES:
        own = rules.source_shape(node, slot)
        return rules.aligned(own, output)[rows.axis] == 1
    if node.name() == "LinearBackward0":
        return slot == 1 and rows.axis < len(output) - 1
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
    is_sum = name == "AddmmBackward0"
    if (name, slot) in _BIASES:
        values = rules.summed_to_source(grad, node, slot, rows.axis).values
        if rows.before != 1 or rows.after != 1:
            values = values.unflatten(0, (rows.before, -1, rows.after)).sum((0, 2))
        return forms.multiplied(
            Dense(values), float(rules.saved(node, "beta")) if is_sum else 1.0
        )
    on_the_left = slot == int(is_sum)
    if name == "LinearBackward0":  # of (rows, *, out) and (rows, *, in): * is theirs
        other, on_the_left = rules.saved(node, "input").movedim(rows.axis, 0), True
        rows = rows._replace(after=rows.after * math.prod(other.shape[1:-1]))
        other, grad = other.flatten(0, -2), grad.flatten(0, -2)
    elif on_the_left:  # the other's columns are the rows of samples
        other = rules.saved(node, "mat2").transpose(-1, -2)
    else:
        other = rules.saved(node, "mat1" if is_sum else "self")
    other = other.conj_physical()
    if name == "MvBackward0":
        grad = grad.unsqueeze(1)
    # Both are (groups, rows, *), without the groups where there is one matrix alone.
    grad = grad.unsqueeze(0) if grad.dim() == 2 else grad.transpose(0, 1)
    other = other.unsqueeze(0) if other.dim() == 2 else other
    factors = [_by_sample(each, rows) for each in (other, grad)]
    found = Outer(*(reversed(factors) if on_the_left else factors))
    if is_sum:
        return forms.multiplied(found, float(rules.saved(node, "alpha")))
    return found


def _by_sample(matrices: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Returns ``(G, R, p)`` as ``(N, G, T, p)``, where R rows are N times T."""
    if len(matrices) == rows.before == rows.after == 1:
        return matrices[0].unsqueeze(1).unsqueeze(1)
    cut = matrices.unflatten(1, (rows.before, -1, rows.after))
    return cut.permute(2, 0, 1, 3, 4).flatten(2, 3)
