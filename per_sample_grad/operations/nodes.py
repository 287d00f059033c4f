"""Autograd's graph: its nodes, their shapes and settings, and its structure."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# torch gives an integer that may be negative without its sign.
NEGATIVE = 2**63
# Nodes that change a tensor's shape, and neither its numbers nor their order; and its
# dtype.
UNCHANGED = (
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0",
    "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "AliasBackward0",
    "CloneBackward0", "ToCopyBackward0",
)  # fmt: skip
_KINDS, _SEVERAL = {bool, int, str, type(None)}, (tuple, list)
# How the names of attributes begin that hold a saved tensor as hooks keep it.
_AS_KEPT = "_raw_saved_"


def output_shape(node: Node, number: int = 0) -> tuple[int, ...]:
    """Returns the shape of a tensor that the node's operation returned."""
    return tuple(node._input_metadata[number].shape)


def input_shapes(node: Node) -> tuple[tuple[int, ...] | None, ...]:
    """Returns the shapes of an operation's inputs; None for those without a graph."""
    return tuple(
        None if each is None else output_shape(each, number)
        for each, number in node.next_functions
    )


def source(node: Node, slot: int) -> Any:
    """Returns the shape and dtype of the tensor that the operation took."""
    below, number = node.next_functions[slot]
    assert below is not None
    return below._input_metadata[number]


def aligned(shape: Sequence[int], output: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape with as many dimensions as the output's."""
    return (1,) * (len(output) - len(shape)) + tuple(shape)


def order_of(node: Node) -> tuple[int, ...] | None:
    """Returns the input's dimensions in the output's order; None: another operation."""
    name, rank = node.name(), len(output_shape(node))
    if name == "PermuteBackward0":
        return tuple(dim % rank for dim in map(signed, saved(node, "dims")))
    if name == "TransposeBackward0":
        first, second = (signed(saved(node, f"dim{n}")) % rank for n in (0, 1))
    elif name == "TBackward0" and rank == 2:
        first, second = 0, 1
    else:
        return None
    order = list(range(rank))
    order[first], order[second] = second, first
    return tuple(order)


def signed(dim: int) -> int:
    """Returns a dimension as it was given, from what torch has saved of it."""
    return dim - 2 * NEGATIVE if dim >= NEGATIVE else dim


def saved(node: Node, name: str) -> Any:
    """Returns what an operation has saved under this name."""
    value = getattr(node, f"_saved_{name}")
    return value.detach() if isinstance(value, torch.Tensor) else value


@functools.cache
def saved_names(kind: type[Node], prefix: str = "_saved_") -> tuple[str, ...]:
    """Returns the attributes with what operations of a kind save."""
    return tuple(name for name in dir(kind) if name.startswith(prefix))


@functools.cache
def is_pointwise(node: str) -> bool:
    """Returns whether an operation computes each number from those in its place.

    Of some names there are overloads for numbers alone, which have no tags.
    """
    found = re.fullmatch(r"(\w+)Backward\d+", node)
    if found is None:
        return False
    names = _operations_by_node().get(found[1], ())
    every = [getattr(torch.ops.aten, name) for name in names]
    # Torch does not say so of the kernel of a PReLU.
    return found[1] == "PreluKernel" or any(
        torch.Tag.pointwise in getattr(operation, overload).tags
        for operation in every
        for overload in operation.overloads()
    )


@functools.cache
def _operations_by_node() -> dict[str, list[str]]:
    """Returns the names of torch's operations, as their nodes write them."""
    every = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    found: dict[str, list[str]] = {}
    for name in {name.partition(".")[0] for space, _, name in every if space == "aten"}:
        found.setdefault(name.title().replace("_", ""), []).append(name)
    return found


def output_edge(output: torch.Tensor) -> GradientEdge:
    """Returns where the gradient of an output arrives, also after in-place changes.

    An in-place operation on a view gives the view a new history, from its base. The
    edge of the base stays, and where the view only changes the shape (a Linear of many
    dimensions) its gradient is the output's.
    """
    edge = get_gradient_edge(output)
    base = output._base if output._is_view() else None
    if base is not None and base.requires_grad and edge.node.name() == "ViewBackward0":
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
        parameter = names.get(id(getattr(node, "variable", None)))
        shapes = [tuple(data.shape) for data in node._input_metadata]
        below = [(numbers.get(each), output) for each, output in node.next_functions]
        settings = [
            (name, value)
            for name, value in saved
            if set(map(type, value if type(value) in _SEVERAL else (value,))) <= _KINDS
        ]
        rows.append((node.name(), parameter, shapes, below, settings))
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
