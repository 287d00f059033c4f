"""Autograd's graph: its nodes in the order of a backward pass, and their structure."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from per_sample_grad.operations.nodes import saved_names

# Nodes of views that keep the elements and their order.
_RESHAPES = ("ViewBackward0",)
_SETTINGS = (bool, int, str, type(None))
_KINDS = {*_SETTINGS}
# How the names of attributes begin that hold a saved tensor as hooks keep it.
_AS_KEPT = "_raw_saved_"


def output_edge(output: torch.Tensor) -> GradientEdge:
    """Returns where the gradient of an output arrives, also after in-place changes.

    An in-place operation on a view gives the view a new history, from its base. The
    edge of the base stays, and where the view only changes the shape (a Linear of many
    dimensions) its gradient is the output's.
    """
    edge = get_gradient_edge(output)
    base = output._base if output._is_view() else None
    if base is not None and base.requires_grad and edge.node.name() in _RESHAPES:
        # Compare nodes: strides say nothing on a lazy backend.
        below = get_gradient_edge(base)
        if edge.node.next_functions == ((below.node, below.output_nr),):
            edge = below
    return edge


def backward_nodes(root: Node | None, stop: Collection[Node] = ()) -> list[Node]:
    """Returns all nodes that a backward pass comes by, each after those below it.

    It begins at ``root``, and neither visits nor passes the nodes ``stop``.
    """
    found: list[Node] = []
    seen: set[Node | None] = {None, *stop}
    stack = [(root, False)]
    while stack:
        node, is_finished = stack.pop()
        if is_finished and node is not None:
            found.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(below, False) for below, _ in node.next_functions]
    return found


def ends(nodes: Iterable[Node], wanted: Collection[Node]) -> set[Node]:
    """Returns the wanted nodes from which none of the others can be reached.

    A backward pass to these passes by the others. ``nodes`` are `backward_nodes`.
    """
    found: set[Node] = set()
    above: set[Node] = set()  # wanted nodes, and those that lead to one
    for node in nodes:
        leads_to_one = any(below in above for below, _ in node.next_functions)
        if node in wanted or leads_to_one:
            above.add(node)
        if node in wanted and not leads_to_one:
            found.add(node)
    return found


def structure(nodes: Sequence[Node], names: Mapping[int, str]) -> str:
    """Returns a digest of operations, their settings, and what takes what.

    Settings are dimensions, indices, sizes and flags, and not floats: they scale and
    mix nothing, and a coefficient that changes at every step does not make another
    structure. ``names`` has the parameter's name for ``id(parameter)``.
    """
    numbers = {node: number for number, node in enumerate(nodes)}
    rows = []
    for node in nodes:
        saved = [(name, getattr(node, name)) for name in _setting_names(type(node))]
        rows.append(
            (
                node.name(),
                names.get(id(getattr(node, "variable", None))),
                [tuple(data.shape) for data in node._input_metadata],
                [(numbers.get(below), output) for below, output in node.next_functions],
                [
                    (name, value)
                    for name, value in saved
                    if isinstance(value, _SETTINGS)
                    or (
                        isinstance(value, (tuple, list))
                        and set(map(type, value)) <= _KINDS
                    )
                ],
            )
        )
    # A digest and not `hash`, which is the same for -1 and -2.
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def is_saved_by_hooks(nodes: Iterable[Node]) -> bool:
    """Returns whether hooks keep what an operation has saved, where torch tells."""
    return any(
        getattr(getattr(node, name), "unpack_hook", None) is not None
        for node in nodes
        for name in saved_names(type(node), _AS_KEPT)
    )


@functools.cache
def _setting_names(kind: type[Node]) -> tuple[str, ...]:
    """Returns the saved attributes except tensors, whose hooks reading would run."""
    raw = saved_names(kind, _AS_KEPT)
    return tuple(name for name in saved_names(kind) if "_raw" + name not in raw)
