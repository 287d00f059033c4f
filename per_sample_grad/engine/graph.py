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
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from per_sample_grad.errors import CoverageError

# Nodes of views that keep the elements and their order.
_RESHAPES = ("ViewBackward0",)
# Nodes that run another graph inside, in which parameters would not be seen.
_OPAQUE = ("CheckpointFunctionBackward",)
# Nodes that take or put rows by a tensor of indices: along the first dimensions that
# are indexed; along one dimension, `_saved_dim`; or along all of them as one.
_INDEXED = ("IndexBackward0", "IndexPutBackward0")
_ALONG_A_DIMENSION = (
    "IndexSelectBackward0", "GatherBackward0", "SortBackward0", "SortBackward1",
    "TopkBackward0", "IndexCopyBackward0", "IndexAddBackward0", "ScatterBackward0",
    "ScatterAddBackward0",
)  # fmt: skip
_FLAT = ("TakeBackward0",)
_BY_INDICES = frozenset((*_INDEXED, *_ALONG_A_DIMENSION, *_FLAT))


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
        kind: The operation's class.
        name: Its name; empty where the class tells it.
        settings: Its dimensions, indices, sizes and flags, by name.
        others: The names of what it has saved besides, but for tensors.
        outputs: Which outputs of the nodes below it takes.
        below: The numbers of the nodes below; None where there is none.
        params: The names of the parameters that are such nodes; None for
            other leaves, and the empty string for nodes that are not leaves.
    """

    call: int | None
    kind: type
    name: str
    settings: tuple[tuple[str, object], ...]
    others: tuple[str, ...]
    outputs: tuple[int, ...]
    below: tuple[int | None, ...]
    params: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Reached:
    """What the losses depend on: calls, and what is outside of them."""

    regions: frozenset[int]  # the positions of the calls among those given
    outside: Mapping[str, int]  # the number of uses, of parameters that have any
    # What was seen: operations, their settings, and which takes what from which.
    stages: tuple[Stage, ...]
    structure: str  # a digest of that
    custom: str | None  # an autograd.Function: its forward pass may have run anything
    has_other_leaves: bool  # whether anything but the parameters takes a gradient
    # Samples are taken in an order that is data: two orders have the same structure.
    reordered: bool
    # What takes a node's tensor: a node, or a call (its position), and as which input.
    consumers: Mapping[Node, Sequence[tuple[Node | int, int]]]
    outputs: frozenset[Node]  # of the calls
    numbers: Mapping[Node, int]  # of the nodes, in their order

    def without_graph(self, outside: Mapping[str, int]) -> Reached:
        """Returns what may be kept, with only these uses outside of calls."""
        none: dict[Node, Any] = {}
        return dataclasses.replace(
            self, outside=outside, consumers=none, outputs=frozenset(), numbers=none
        )


def walk(
    losses: torch.Tensor,
    regions: Iterable[Region],
    names: Mapping[int, str],
    batch_dims: Collection[int],
) -> Reached:
    """Finds the calls that ``losses`` depend on, and uses outside of them.

    ``names`` has the parameter's name for ``id(parameter)``; ``batch_dims`` are the
    dimensions that count samples, in one call or another.

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
    reordered, several = False, losses.shape[0] > 1
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
            stage = Stage(number, Node, "", (), (), (), (), ())
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
            if several and name in _BY_INDICES and not reordered:
                reordered = _reorders(node, batch_dims)
            following = [below for below, _ in functions]
            outputs = tuple([output for _, output in functions])
            kind = type(node)
            told = "" if kind.__name__ == name else name
            stage = Stage(None, kind, told, *_settings(node), outputs, (), ())
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
        tuple(stages),
        structure,
        custom,
        any(None in stage.params for stage in stages),
        reordered,
        consumers,
        frozenset(by_output),
        numbers,
    )


def repeats(
    stages: Sequence[Stage],
    losses: torch.Tensor,
    regions: Sequence[Region],
    names: Mapping[int, str],
    batch_dims: Collection[int],
) -> Mapping[Node, int] | None:
    """Returns the nodes' numbers if a walk would see what another one saw; else None.

    That takes less time than a walk, whose arguments the others are. It did not find
    then that samples are reordered.
    """
    by_output = {region.output.node: i for i, region in enumerate(regions)}
    root = losses.grad_fn
    numbers: dict[Node, int] = {} if root is None else {root: 0}
    nodes = list(numbers)
    # Nodes come in the sequence of the walk, which that of the numbers is not.
    stack = list(nodes)
    seen: set[Node] = set()
    for call, kind, name, settings, others, outputs, below, params in stages:
        node = stack.pop() if stack else None
        while node in seen:
            node = stack.pop() if stack else None
        if node is None or by_output.get(node) != call:
            return None
        seen.add(node)
        following: Sequence[Node | None]
        if call is not None:
            following = regions[call].inputs
        else:
            # Asking for a name takes longer than for a class.
            if type(node) is not kind or (name and node.name() != name):
                return None
            for attribute, value in settings:
                if getattr(node, attribute) != value:
                    return None
            for attribute in others:
                if _is_setting(getattr(node, attribute)):
                    return None
            if (name or kind.__name__) in _BY_INDICES and _reorders(node, batch_dims):
                return None
            functions = node.next_functions
            following = [each for each, _ in functions]
            if outputs != tuple([output for _, output in functions]):
                return None
        if len(following) != len(below):
            return None
        for each, number, param in zip(following, below, params):
            if each is None:
                if number is not None:
                    return None
                continue
            if numbers.setdefault(each, len(numbers)) != number:
                return None
            if param == "":
                if each not in seen:
                    stack.append(each)
                continue
            variable = getattr(each, "variable", None)
            if variable is None or names.get(id(variable)) != param:
                return None
            if each in by_output and each not in seen:
                stack.append(each)
    return numbers if seen.issuperset(stack) else None


@dataclasses.dataclass(frozen=True)
class Structure:
    """What a walk found, and under what its proof is kept.

    Attributes:
        reached: What the losses depend on.
        key: Under what a proof is kept.
        lowest: The calls, by position, from which a backward pass comes by no other. It
            comes by all of them, as long as `goes_on` holds for each. None: not known.
    """

    reached: Reached
    key: Hashable
    lowest: frozenset[int] | None = None


def shapes_of(nodes: Iterable[Node]) -> tuple[tuple[torch.Size, ...], ...]:
    """Returns the shapes of all outputs of each node."""
    found = []
    for node in nodes:
        data = node._input_metadata
        one = len(data) == 1
        found.append((data[0].shape,) if one else tuple([m.shape for m in data]))
    return tuple(found)


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


def lowest_calls(root: Node | None, regions: Sequence[Region]) -> frozenset[int] | None:
    """Returns `Structure.lowest`; None where a pass does not come by all calls."""
    nodes = [region.output.node for region in regions]
    found, passed = lowest(root, nodes)
    if len(found) + len(passed) < len(nodes) or not all(map(goes_on, regions)):
        return None
    return frozenset(n for n, node in enumerate(nodes) if node in found)


def goes_on(region: Region) -> bool:
    """Returns whether a call hands gradients on to all of its inputs."""
    node, inputs = region.output.node, region.inputs
    if not inputs:
        return True
    below = [each for each, _ in node.next_functions]
    if all(each in below for each in inputs):
        return True
    return len(reachable(node, inputs, inputs)) == len(set(inputs))


def _settings(node: Node) -> tuple[tuple[tuple[str, object], ...], tuple[str, ...]]:
    """Returns an operation's settings, and the names of what else it has saved.

    Settings are dimensions, indices, sizes and flags. Floats are none. They scale and
    mix nothing, and a coefficient that changes at every step does not make another
    structure.
    """
    found, others = [], []
    for name in _setting_names(type(node)):
        value = getattr(node, name)
        if _is_setting(value):
            found.append((name, value))
        else:
            others.append(name)
    return tuple(found), tuple(others)


@functools.cache
def _setting_names(kind: type[Node]) -> tuple[str, ...]:
    """Returns the saved attributes except tensors, whose hooks reading would run."""
    names = dir(kind)
    saved = (name for name in names if name.startswith("_saved_"))
    return tuple(name for name in saved if "_raw" + name not in names)


def _reorders(node: Node, batch_dims: Collection[int]) -> bool:
    """Returns whether a node takes rows along a batch dimension by tensors of indices.

    Its name is one of `_BY_INDICES`. The node's settings decide; the indices themselves
    are on the device. A gather of each sample's own numbers
    (``logits[arange(B), targets]``) has other dimensions.
    """
    name = node.name()
    following = [following for following, _ in node.next_functions]
    if all(below is None or hasattr(below, "variable") for below in following):
        return False  # a leaf is a table, whose rows are not samples
    if name in _FLAT:
        return True
    if name in _INDEXED:
        return len(node._raw_saved_indices) - 1 in batch_dims  # type: ignore[attr-defined]
    dim = node._saved_dim  # type: ignore[attr-defined]
    rank = len(node._input_metadata[0].shape)
    dim = dim - 2**64 if dim >= 2**63 else dim  # torch gives it without a sign
    return dim % rank in {each % rank for each in batch_dims}


def _is_setting(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (bool, int, str))
