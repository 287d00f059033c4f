"""Whether a graph keeps samples apart whatever the data are.

What a comparison with autograd has found holds for later passes of the same structure
only if no operation decides by its data which samples meet, and no coefficient of zero
has hidden that they do. So the walk goes from the losses, whose samples are known, to
each call that a rule was applied to, and asks `operations.layouts` where the samples
are on the way. A call must be reached with its samples where its rule takes them to be,
and never by what has to be the same for all samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from per_sample_grad.engine.recording import RecordedCall
from per_sample_grad.layers.registry import is_of_torch
from per_sample_grad.operations import layouts, rules
from per_sample_grad.operations.uses import OperationCall


class _Place(NamedTuple):
    """A tensor on the way: an output of a node.

    Attributes:
        node: The node; its number among outputs follows.
        number: See there.
        dim: The dimension that counts samples; None: it must be the same for all.
        inside: Of a call whose module is not known to keep samples apart: the nodes of
            its inputs, where the way through it ends. None: outside of such calls.
    """

    node: Node
    number: int
    dim: int | None
    inside: frozenset[Node] | None


def samples_stay_apart(
    losses: torch.Tensor, calls: Sequence[RecordedCall], may_read: bool
) -> bool:
    """Returns whether losses depend on samples one by one, whatever the data.

    Args:
        losses: ``(B,)``.
        calls: What accounts for parameters: calls of modules, and operations.
        may_read: Whether operations may be asked for tensors that they have saved.
    """
    if losses.shape[0] == 1 or losses.grad_fn is None:
        return True
    by_output = {call.region.output.node: call for call in calls}
    stack = [_Place(losses.grad_fn, 0, 0, None)]
    seen = set(stack)
    while stack:
        place = stack.pop()
        below = _below(place, by_output, losses.shape[0], may_read)
        if below is None:
            return False
        new = set(below) - seen
        seen |= new
        stack += new
    return True


def _below(
    place: _Place, calls: dict[Node, RecordedCall], num_samples: int, may_read: bool
) -> Collection[_Place] | None:
    """Returns what a place depends on; None: samples may meet there."""
    node, _, dim, inside = place
    if hasattr(node, "variable"):
        return []
    if inside is not None and node in inside:
        inside = None
    call = calls.get(node) or _behind_view(node, calls)
    if call is not None and inside is None:
        if not _is_where_its_rule_says(call, place, num_samples):
            return None
        if not call.owner.is_operation:
            if is_of_torch(call.call.module, call.owner.rule):
                return list(_inputs(call, num_samples))
            inside = frozenset(call.region.inputs)
    inputs = [
        None if each is None else tuple(each._input_metadata[number].shape)
        for each, number in node.next_functions
    ]
    found: layouts.Layout | None = None
    if dim is not None:
        shape = tuple(node._input_metadata[place.number].shape)
        found = layouts.LayoutQuery(
            node, shape, dim, tuple(inputs), num_samples, may_read
        ).layout()
    if found is None:
        if inside is not None and None in inputs:
            return None  # that may be the samples, which no call tells
        found = [None] * len(inputs)
    return [
        _Place(each, number, at, inside)
        for (each, number), at in zip(node.next_functions, found)
        if each is not None
    ]


def _behind_view(node: Node, calls: dict[Node, RecordedCall]) -> RecordedCall | None:
    """Returns the call whose output a node is that only changes its shape."""
    if node.name() not in rules.UNCHANGED:
        return None
    call = calls.get(node.next_functions[0][0])  # type: ignore[arg-type]
    if call is None or call.shape != node._input_metadata[0].shape:
        return None
    return None if call.owner.is_operation else call


def _is_where_its_rule_says(
    call: RecordedCall, place: _Place, num_samples: int
) -> bool:
    """Returns whether samples are where the rule of this call takes them to be."""
    if place.dim is None:
        return False
    own = call.call
    if call.owner.is_operation:
        assert isinstance(own, OperationCall)
        if own.use.rows is not None:
            return own.use.rows.axis == place.dim and own.use.rows.before == 1
    shape = tuple(place.node._input_metadata[place.number].shape)
    try:
        dim = layouts.through_view(shape, place.dim, call.shape, num_samples)
    except layouts.Unknown:
        return False
    return dim == own.batch_dim % len(call.shape)


def _inputs(call: RecordedCall, num_samples: int) -> Iterator[_Place]:
    """Returns the inputs of a call of a layer, each with its samples if it has any."""
    batch_dim = call.call.batch_dim
    for node in call.region.inputs:
        shape = node._input_metadata[0].shape
        # Of one dimension are weights within bags.
        rank, dim = len(shape), None
        if rank >= 2 and -rank <= batch_dim < rank:
            rows = shape[batch_dim]
            dim = batch_dim % rank if rows and rows % num_samples == 0 else None
        yield _Place(node, 0, dim, None)
