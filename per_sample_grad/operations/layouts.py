"""Where the samples of an operation's inputs are, from where those of its output are.

A rule says of one operation: if this dimension of the output counts samples, that
dimension of each input does, and no number of the output depends on another sample's.
An operation without a rule may let any two samples meet, by its data or otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch.autograd.graph import Node

from per_sample_grad.operations import nodes

Shape = tuple[int, ...]


class Rows(NamedTuple):
    """Where a tensor has its samples: as many consecutive rows for each of them.

    Attributes:
        axis: The dimension that counts the rows.
        before: How often all samples' rows follow one another in it: another dimension
            was folded into it.
    """

    axis: int
    before: int = 1


def by_shape(shape: Sequence[int], dim: int, num_samples: int) -> Rows | None:
    """Returns where a tensor has samples if this dimension may count them."""
    if not -len(shape) <= dim < len(shape):
        return None
    has_rows = shape[dim] > 0 and shape[dim] % num_samples == 0
    return Rows(dim % len(shape)) if has_rows else None


# For each input, the dimension that counts samples; None: it must be the same for all.
# Samples' rows follow one another as often as in the output, or `Rows` says how often.
Layout = Sequence[Rows | int | None]


class Unknown(Exception):
    """Samples may meet here, as far as the operation's settings tell."""


class LayoutQuery(NamedTuple):
    """Asks where an operation's inputs have the samples that its output has.

    Attributes:
        node: Its node in autograd's graph.
        shape: The shape of the output.
        dim: The dimension of the output that counts samples' rows, not negative.
        before: How often all of these follow one another in it; see `Rows`.
        inputs: The shapes of the inputs; None for those without a graph.
        num_samples: B.
        may_read: Whether the tensors that it has saved may be looked at.
    """

    node: Node
    shape: Shape
    dim: int
    before: int
    inputs: tuple[Shape | None, ...]
    num_samples: int
    may_read: bool


LayoutRule = Callable[[LayoutQuery], Layout]


def _at(shape: Shape | None, dim: int, of: LayoutQuery) -> int | None:
    """Returns this dimension of an input if it has as many rows as the output has."""
    if shape is None:
        return None
    if not 0 <= dim < len(shape) or shape[dim] != of.shape[of.dim]:
        raise Unknown
    return dim


def through_view(shape: Shape, rows: Rows, before: Shape, num_samples: int) -> Rows:
    """Returns where the samples were ``before`` a view to this shape.

    Raises:
        Unknown: No dimension counts them.
    """
    outer, start = math.prod(shape[: rows.axis]) * rows.before, 1
    if 0 in before:  # nothing is anywhere
        raise Unknown
    for axis, size in enumerate(before):
        if start * size > outer or (start == outer and num_samples == 1):
            count, rest = divmod(outer, start)
            if rest or size % (count * num_samples):
                break
            return Rows(axis, count)
        start *= size
    raise Unknown


def viewed(of: LayoutQuery) -> Layout:
    [before] = of.inputs
    assert before is not None
    return [through_view(of.shape, Rows(of.dim, of.before), before, of.num_samples)]


def _of_broadcast(shape: Shape | None, output: Shape, dim: int) -> int | None:
    """Returns where an input that is broadcast has its samples; None: nowhere."""
    if shape is None:
        return None
    own = nodes.aligned(shape, output)
    if len(own) != len(output) or any(n not in (1, m) for n, m in zip(own, output)):
        raise Unknown
    at = dim - len(output) + len(shape)
    return at if own[dim] == output[dim] and at >= 0 else None


def broadcast(of: LayoutQuery) -> Layout:
    return [_of_broadcast(shape, of.shape, of.dim) for shape in of.inputs]


def permuted(of: LayoutQuery) -> Layout:
    order = nodes.order_of(of.node)
    if order is None:
        raise Unknown
    return [order[of.dim]]


def along(name: str, leading: int = 0) -> LayoutRule:
    """Returns the rule of operations along dimensions which they have saved.

    Slices along another dimension are computed by themselves. ``leading`` is how many
    dimensions the output has more than an input, of those it is along.
    """

    def rule(of: LayoutQuery) -> Layout:
        given = getattr(of.node, f"_saved_{name}")
        given = given if isinstance(given, Iterable) else [given]
        found: list[int | None] = []
        for shape in of.inputs:
            # No graph, or a number that fills; of those that are stacked, one sample's.
            if shape is None or not (shape or leading):
                found.append(None)
                continue
            rank = len(shape) + leading
            if not given or None in given:
                raise Unknown
            dims = {nodes.signed(dim) % rank for dim in given}
            others = [dim for dim in range(rank) if dim not in dims]
            if not leading and len(of.shape) == len(others):
                at = others[of.dim]
            elif of.dim not in others or len(of.shape) < rank:
                raise Unknown
            else:
                at = others.index(of.dim) if leading else of.dim
            found.append(_at(shape, at, of))
        return found

    return rule


def sliced(of: LayoutQuery) -> Layout:
    """Also along the samples, where nothing is left out."""
    [shape] = of.inputs
    return [of.dim] if shape == of.shape else along("dim")(of)


def within(mixed: Callable[[LayoutQuery], Iterable[int]], count: int = 1) -> LayoutRule:
    """Returns the rule of operations that mix numbers along these dimensions alone.

    ``count`` inputs have the output's samples, in the same dimension.
    """

    def rule(of: LayoutQuery) -> Layout:
        if of.dim in mixed(of):
            raise Unknown
        found = [_at(shape, of.dim, of) for shape in of.inputs[:count]]
        return [*found, *[None] * (len(of.inputs) - count)]

    return rule


def all_but_first(of: LayoutQuery) -> Iterable[int]:
    return range(1, len(of.shape))


def last(count: int) -> Callable[[LayoutQuery], Iterable[int]]:
    return lambda of: range(len(of.shape) - count, len(of.shape))


def normalized(of: LayoutQuery) -> Iterable[int]:
    return last(len(of.node._saved_normalized_shape))(of)  # type: ignore[attr-defined]


def padded(of: LayoutQuery) -> Iterable[int]:
    pad, last = of.node._saved_pad, len(of.shape) - 1  # type: ignore[attr-defined]
    return [last - n // 2 for n, width in enumerate(pad) if width]


def restrided(of: LayoutQuery) -> Layout:
    """What torch's pooling to one place does to a mean, which moves no number."""
    mean, _ = of.node.next_functions[0]
    _, channels, *rest = of.shape
    strides = tuple(of.node._saved_stride)  # type: ignore[attr-defined]
    is_same = of.inputs[0] == of.shape and strides == (channels, 1, channels, channels)
    is_mean = mean is None or mean.name() == "MeanBackward1"
    if not is_same or not is_mean or rest != [1, 1]:
        raise Unknown
    return [of.dim]


def repeated(of: LayoutQuery) -> Layout:
    """Each sample has some copies of what is repeated, or all have rows in it."""
    [shape] = of.inputs
    assert shape is not None
    at, rows = of.dim - len(of.shape) + len(shape), of.shape[of.dim]
    own = shape[at] if at >= 0 else 1
    if at >= 0 and own == rows:
        return [at]
    if not own or of.before != 1 or rows % (own * of.num_samples):
        raise Unknown
    return [None]


def batch_normalized(of: LayoutQuery) -> Layout:
    """Each channel, which instance norm makes of samples, has its own statistics."""
    if of.dim == 1:
        return [1, *[None if shape is None else 0 for shape in of.inputs[1:]]]
    if getattr(of.node, "_saved_training", False):
        raise Unknown
    return within(all_but_first)(of)


def product(
    *axes: tuple[int | None, int | None], with_bias: bool = False
) -> LayoutRule:
    """Returns the rule of a product; ``axes`` are its factors' by the output's."""

    def rule(of: LayoutQuery) -> Layout:
        first, *_ = of.inputs
        bias = [_of_broadcast(first, of.shape, of.dim)] if with_bias else []
        return [*bias, *axes[of.dim]]

    return rule


def attended(of: LayoutQuery) -> Layout:
    """Samples, and heads, attend to themselves; a mask is added to the scores."""
    query, key, *_ = of.inputs
    if of.dim > 1 or query is None or key is None:
        raise Unknown
    scores = (*query[:3], key[2])
    masks = [_of_broadcast(shape, scores, of.dim) for shape in of.inputs[3:]]
    return [*[_at(shape, of.dim, of) for shape in of.inputs[:3]], *masks]


def indexed(of: LayoutQuery) -> Layout:
    """Rows along dimensions that no tensor of indices is for."""
    if not of.may_read:
        raise Unknown
    indices = of.node._saved_indices  # type: ignore[attr-defined]
    taken = [dim for dim, index in enumerate(indices) if index is not None]
    if any(not indices[dim].dtype.is_signed for dim in taken):  # a mask
        raise Unknown
    [shape] = of.inputs
    assert shape is not None
    rank = len(of.shape) - len(shape) + len(taken)  # that of the indices
    adjacent = taken == list(range(taken[0], taken[-1] + 1))
    place = taken[0] if adjacent else 0
    if place <= of.dim < place + rank:
        raise Unknown
    rest = [dim for dim in range(len(shape)) if dim not in taken]
    return [_at(shape, rest[of.dim if of.dim < place else of.dim - rank], of)]


def looked_up(of: LayoutQuery) -> Layout:
    """Rows of a table, which any sample may take."""
    if of.dim == len(of.shape) - 1:
        raise Unknown
    return [None]


def class_losses(of: LayoutQuery) -> Layout:
    """Of ``(N, C, *)``: the second dimension is that of the classes."""
    return [of.dim + (of.dim > 0), *[None] * (len(of.inputs) - 1)]
