"""The operation of a node in autograd's graph: its shapes and its settings."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

# torch gives an integer that may be negative without its sign.
NEGATIVE = 2**63
# Nodes that change a tensor's shape, and neither its numbers nor their order; and its
# dtype.
UNCHANGED = (
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0",
    "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "AliasBackward0",
    "CloneBackward0", "ToCopyBackward0",
)  # fmt: skip
_POINTWISE = ("PreluKernel",)  # which torch does not say of these


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


def source_shape(node: Node, slot: int) -> tuple[int, ...]:
    """Returns the shape of the tensor that the operation took."""
    return tuple(source(node, slot).shape)


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
    return found[1] in _POINTWISE or any(
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
