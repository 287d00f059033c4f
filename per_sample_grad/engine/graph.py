"""A walk through an autograd graph finds uses that no rule accounts for.

The walk goes from the losses backwards and steps over every recorded call: from the
node that made its output straight to the nodes that made its inputs. A parameter that
is reached nevertheless has a use that no rule saw. That finds functional uses of a
weight, parametrizations, ties, MultiheadAttention's own parameters, and outputs that
were replaced by an in-place operation on a view. Paths are followed rather than uses
counted, so that a weight that autocast casts once and uses twice is right.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from per_sample_grad.errors import CoverageError
from xla_replica.common.trees import leaves

# Nodes of views that keep the elements and their order.
_RESHAPES = ("ViewBackward0",)
# Nodes that run another graph inside, in which parameters would not be seen.
_OPAQUE = ("CheckpointFunctionBackward",)


# A node in Python needs more than a reference to stay alive.
_IN_PYTHON = torch.autograd.function.BackwardCFunction


class Region(NamedTuple):
    """The part of a graph that one call of a module made."""

    output: GradientEdge  # where the gradient of its output arrives
    inputs: tuple[Node, ...]  # of its inputs that require grad


def region_of(inputs: Iterable[torch.Tensor], output: torch.Tensor) -> Region:
    """Returns the region of a call, which holds also after in-place changes.

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
    nodes = [get_gradient_edge(each).node for each in inputs if each.requires_grad]
    return Region(edge, tuple(nodes))


@dataclasses.dataclass(frozen=True)
class Walk:
    """What the losses depend on: calls, and what is outside of them.

    Attributes:
        calls: The positions of the calls among those given.
        outside: The number of uses outside of calls, of parameters that have any.
        structure: A digest of operations, their settings, and what takes what.
        custom: The name of an `autograd.Function`, whose forward pass may have run
            anything; None: there is none.
        has_other_leaves: Whether anything but the parameters takes a gradient.
        consumers: What takes a node's tensor: a node, or a call (its position), and as
            which input.
        outputs: The nodes that made the outputs of the calls.
    """

    calls: Collection[int]
    outside: Mapping[str, int]
    structure: str
    custom: str | None
    has_other_leaves: bool
    consumers: Mapping[Node, Sequence[tuple[Node | int, int]]]
    outputs: Collection[Node]


def walk(
    losses: torch.Tensor, regions: Iterable[Region], names: Mapping[int, str]
) -> Walk:
    """Finds the calls that ``losses`` depend on, and uses outside of them.

    ``names`` has the parameter's name for ``id(parameter)``.

    Raises:
        CoverageError: A reentrant checkpoint hides a part of the graph.
    """
    # Of calls with the same output (a module that ends with another) the last counts.
    by_output = {region.output.node: (i, region) for i, region in enumerate(regions)}
    calls: set[int] = set()
    outside: Counter[str] = Counter()
    stack: list[Node] = [losses.grad_fn] if losses.grad_fn is not None else []
    seen: set[Node] = set()
    # Numbers in the order of first mention, which is the same for graphs alike.
    numbers: dict[Node, int] = dict.fromkeys(stack, 0)
    consumers: dict[Node, list[tuple[Node | int, int]]] = {}
    structure: list[object] = []
    custom: str | None = None
    has_other_leaves = False
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        consumer: Node | int = node
        following: Sequence[Node | None]
        if node in by_output:
            consumer, region = by_output[node]
            calls.add(consumer)
            following = region.inputs
            structure.append(consumer)
        else:
            name, functions = node.name(), node.next_functions
            if name in _OPAQUE:
                raise CoverageError(
                    "torch.utils.checkpoint with use_reentrant=True hides parameters "
                    "from the graph: pass use_reentrant=False"
                )
            if isinstance(node, _IN_PYTHON):
                custom = name
            following = [below for below, _ in functions]
            outputs = [output for _, output in functions]
            shapes = [tuple(data.shape) for data in node._input_metadata]
            structure.append((name, _settings(node), shapes, outputs))
        for slot, below in enumerate(following):
            if below is None:
                structure.append(None)
                continue
            variable = getattr(below, "variable", None)
            param = "" if variable is None else names.get(id(variable))
            structure.append((numbers.setdefault(below, len(numbers)), param))
            has_other_leaves |= param is None
            consumers.setdefault(below, []).append((consumer, slot))
            if below in seen:
                continue
            # A parameter that is the input of a module is a use, too.
            if variable is None or below in by_output:
                stack.append(below)
            if param:
                outside[param] += 1
    # A digest and not `hash`, which is the same for -1 and -2.
    digest = hashlib.sha256(repr(structure).encode()).hexdigest()
    made = by_output.keys()
    return Walk(calls, outside, digest, custom, has_other_leaves, consumers, made)


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


def gradient_dtypes(nodes: Iterable[Node]) -> set[torch.dtype]:
    """Returns the float dtypes of the gradients that come to these nodes."""
    dtypes = {each.dtype for node in nodes for each in node._input_metadata}
    return {dtype for dtype in dtypes if dtype.is_floating_point}


def _settings(node: Node) -> list[tuple[str, object]]:
    """Returns an operation's settings: dimensions, indices, sizes and flags.

    Floats are none. They scale and mix nothing, and a coefficient that changes at every
    step does not make another structure.
    """
    values = [(name, getattr(node, name)) for name in _setting_names(type(node))]
    kinds = (bool, int, str, type(None))
    return [
        (name, value)
        for name, value in values
        if all(isinstance(leaf, kinds) for leaf in leaves(value))
    ]


def is_saved_by_hooks(nodes: Iterable[Node]) -> bool:
    """Returns whether hooks keep what an operation has saved, where torch tells."""
    return any(
        getattr(getattr(node, name), "unpack_hook", None) is not None
        for node in nodes
        for name in _raw_names(type(node))
    )


@functools.cache
def _raw_names(kind: type[Node]) -> tuple[str, ...]:
    """Returns the attributes that hold a saved tensor as hooks keep it."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


@functools.cache
def _setting_names(kind: type[Node]) -> tuple[str, ...]:
    """Returns the saved attributes except tensors, whose hooks reading would run."""
    names = dir(kind)
    saved = (name for name in names if name.startswith("_saved_"))
    return tuple(name for name in saved if "_raw" + name not in names)
