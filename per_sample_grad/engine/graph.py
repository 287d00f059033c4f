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
    node = output.grad_fn
    if node is None or isinstance(node, _IN_PYTHON):
        edge = get_gradient_edge(output)
    else:  # as torch does, in less time
        edge = GradientEdge(node, output.output_nr)
    base = output._base if output._is_view() else None
    if base is not None and base.requires_grad and edge.node.name() in _RESHAPES:
        # Compare nodes: strides say nothing on a lazy backend.
        below = get_gradient_edge(base)
        if edge.node.next_functions == ((below.node, below.output_nr),):
            edge = below
    nodes = []
    for each in inputs:
        if each.requires_grad:
            node = each.grad_fn
            nodes.append(get_gradient_edge(each).node if node is None else node)
    return Region(edge, tuple(nodes))


def edge_of(tensor: torch.Tensor, output: torch.Tensor) -> GradientEdge:
    """Returns where the gradient goes of a tensor that an output was computed from."""
    if tensor.grad_fn is None and output.grad_fn is not None:
        for node, number in output.grad_fn.next_functions:
            # Asking torch for that of a leaf takes an operation.
            if node is not None and getattr(node, "variable", None) is tensor:
                return GradientEdge(node, number)
    return get_gradient_edge(tensor)


class Stage(NamedTuple):
    """What a walk sees at one node. Nodes have numbers in the order of first mention.

    Attributes:
        call: The position of the call that made it; None: an operation.
        name: The operation's name.
        settings: Its dimensions, indices, sizes and flags, by name.
        shapes: The shapes of its outputs.
        outputs: Which outputs of the nodes below it takes.
        below: The numbers of the nodes below; None where there is none.
        params: The names of the parameters that are such nodes; None for
            other leaves, and the empty string for nodes that are not leaves.
    """

    call: int | None
    name: str
    settings: tuple[tuple[str, object], ...]
    shapes: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    below: tuple[int | None, ...]
    params: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Reached:
    """What the losses depend on: calls, and what is outside of them."""

    regions: frozenset[int]  # the positions of the calls among those given
    outside: Mapping[str, int]  # the number of uses, of parameters that have any
    # A digest of what was seen: operations, their settings, and what takes what.
    structure: str
    custom: str | None  # an autograd.Function: its forward pass may have run anything
    has_other_leaves: bool  # whether anything but the parameters takes a gradient
    # What takes a node's tensor: a node, or a call (its position), and as which input.
    consumers: Mapping[Node, Sequence[tuple[Node | int, int]]]
    outputs: frozenset[Node]  # of the calls


def walk(
    losses: torch.Tensor,
    regions: Iterable[Region],
    names: Mapping[int, str],
) -> Reached:
    """Finds the calls that ``losses`` depend on, and uses outside of them.

    ``names`` has the parameter's name for ``id(parameter)``.

    Raises:
        CoverageError: A reentrant checkpoint hides a part of the graph.
    """
    # Of calls with the same output (a module that ends with another) the last counts.
    by_output = {region.output.node: (i, region) for i, region in enumerate(regions)}
    reached: set[int] = set()
    outside: Counter[str] = Counter()
    stack: list[Node] = [losses.grad_fn] if losses.grad_fn is not None else []
    seen: set[Node] = set()
    # Numbers in the order of first mention, which is the same for graphs alike.
    numbers: dict[Node, int] = dict.fromkeys(stack, 0)
    consumers: dict[Node, list[tuple[Node | int, int]]] = {}
    stages: list[Stage] = []
    custom: str | None = None
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        taker: Node | int = node
        if node in by_output:
            number, region = by_output[node]
            reached.add(number)
            taker = number
            following: Sequence[Node | None] = region.inputs
            stage = Stage(number, "", (), (), (), (), ())
        else:
            name, functions = node.name(), node.next_functions
            if name in _OPAQUE:
                raise CoverageError(
                    "the forward pass used torch.utils.checkpoint with "
                    "use_reentrant=True, which hides the parameters it uses from the "
                    "graph; pass use_reentrant=False, or do not checkpoint while "
                    "capturing"
                )
            if isinstance(node, _IN_PYTHON):
                custom = name
            following = [below for below, _ in functions]
            outputs = tuple([output for _, output in functions])
            shapes = tuple([tuple(data.shape) for data in node._input_metadata])
            stage = Stage(None, name, _settings(node), shapes, outputs, (), ())
        below_numbers: list[int | None] = []
        params: list[str | None] = []
        for slot, below in enumerate(following):
            below_numbers.append(
                None if below is None else numbers.setdefault(below, len(numbers))
            )
            variable = getattr(below, "variable", None)
            is_leaf = variable is not None
            params.append(names.get(id(variable)) if is_leaf else "")
            if below is None:
                continue
            consumers.setdefault(below, []).append((taker, slot))
            if below in seen:
                continue
            # A parameter that is the input of a module is a use, too.
            if not is_leaf or below in by_output:
                stack.append(below)
            if params[-1]:
                outside[params[-1]] += 1
        stages.append(stage._replace(below=tuple(below_numbers), params=tuple(params)))
    # A digest and not `hash`, which is the same for -1 and -2.
    structure = hashlib.sha256(repr(stages).encode()).hexdigest()
    return Reached(
        frozenset(reached),
        outside,
        structure,
        custom,
        any(None in stage.params for stage in stages),
        consumers,
        frozenset(by_output),
    )


@dataclasses.dataclass(frozen=True)
class Inventory:
    """What occurs in a graph, within recorded calls too."""

    names: frozenset[str]  # of operations
    dtypes: frozenset[torch.dtype]  # of gradients


def inventory(losses: torch.Tensor) -> Inventory:
    """Returns everything that a backward pass from ``losses`` comes by."""
    stack: list[Node | None] = [losses.grad_fn]
    seen: set[Node] = set()
    names: set[str] = set()
    dtypes: set[torch.dtype] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name())
        dtypes.update(
            each.dtype for each in node._input_metadata if each.dtype.is_floating_point
        )
        stack.extend(below for below, _ in node.next_functions)
    return Inventory(frozenset(names), frozenset(dtypes))


def inside(region: Region) -> set[Node]:
    """Returns the nodes that a call made."""
    seen: set[Node] = set(region.inputs)
    stack: list[Node] = [region.output.node]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += [below for below, _ in node.next_functions if below is not None]
    return seen.difference(region.inputs)


def reachable(
    root: Node | None, nodes: Collection[Node], ends: Collection[Node] = ()
) -> set[Node]:
    """Returns those of the nodes that a backward pass from ``root`` comes by.

    It goes no further at ``ends``.
    """
    seen = {None, root}
    stack = [root]
    while stack:
        node = stack.pop()
        if node is not None and node not in ends:
            new = {below for below, _ in node.next_functions} - seen
            seen |= new
            stack.extend(new)
    return seen.intersection(nodes)


def lowest(root: Node | None, nodes: Collection[Node]) -> tuple[set[Node], set[Node]]:
    """Returns the nodes from which none of the others can be reached, and the rest.

    A backward pass to the former passes by the latter. Nodes that it cannot reach (a
    module may take no gradient of an input) are in neither set.
    """
    wanted = set(nodes)
    # Whether a wanted node is at this node or below.
    above: dict[Node, bool] = {}
    found: set[Node] = set()
    stack: list[tuple[Node, bool]] = [] if root is None else [(root, False)]
    while stack:
        node, returned = stack.pop()
        following = [n for n, _ in node.next_functions if n is not None]
        if not returned:
            if node in above:
                continue
            above[node] = False
            stack.append((node, True))
            stack.extend((n, False) for n in following if n not in above)
            continue
        below = any(above[n] for n in following)
        if node in wanted and not below:
            found.add(node)
        above[node] = below or node in wanted
    return found, {node for node in wanted if node in above} - found


def _settings(node: Node) -> tuple[tuple[str, object], ...]:
    """Returns an operation's settings: dimensions, indices, sizes and flags.

    Floats are none. They scale and mix nothing, and a coefficient that changes at every
    step does not make another structure.
    """
    values = [(name, getattr(node, name)) for name in _setting_names(type(node))]
    return tuple([(name, value) for name, value in values if _is_setting(value)])


@functools.cache
def _setting_names(kind: type[Node]) -> tuple[str, ...]:
    """Returns the saved attributes except tensors, whose hooks reading would run."""
    names = dir(kind)
    saved = (name for name in names if name.startswith("_saved_"))
    return tuple(name for name in saved if "_raw" + name not in names)


def _is_setting(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (bool, int, str))
