"""Uses of parameters outside known modules, as operations that have a rule.

From a parameter the search climbs the graph towards the losses. What is computed from
parameters alone, such as a table of positions, a normalised weight or ``1 + weight``,
does not depend on samples. It meets samples in an operation that broadcasts it over
them, looks rows up in it or multiplies with it. There the gradient still has a row for
each sample, and a rule of that operation says what each contributes. From there the
contribution goes down to the parameter: unchanged, transposed, or, for what else is
computed, by autograd, vectorised over the samples.

That shapes alone decide where samples are met may be wrong. The comparison with
autograd notices that, as it does for rules of modules.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

import xla_replica
from per_sample_grad.errors import Refusal
from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution, Dense, Outer
from per_sample_grad.layers import registry
from per_sample_grad.layers.registry import Call
from per_sample_grad.operations import products, rules
from per_sample_grad.operations.products import Rows
from xla_replica.common.trees import tensors_in

# How many operations the search climbs, at most, for one parameter.
_LONGEST_SEARCH = 1000
# Nodes that change a tensor's shape, and neither its numbers nor their order; and its
# dtype.
_UNCHANGED = (
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0",
    "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "AliasBackward0",
    "CloneBackward0", "ToCopyBackward0",
)  # fmt: skip
# Nodes that bring dimensions into another order.
_MOVED = ("PermuteBackward0", "TransposeBackward0", "TBackward0")
# Nodes that depend on more than their inputs in the graph.
_BY_DATA = (
    "EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0", "GatherBackward0",
    "IndexPutBackward0",
)  # fmt: skip
# How many operations are gone through by rules on the way down to parameters, at most:
# a tensor that is used again and again has as many ways down as it has uses.
_MOST_STEPS = 64
# What a tensor gets of each sample, on the way.
Found = Contribution | products.Arranged
# From a node, and where the model's tensors are stored.
Belief = Callable[[Node, Collection[int]], bool]
# What takes a node's tensor, and as which input: a node, or a call with a rule, which
# is an integer.
Consumers = Mapping[Node, Sequence[tuple[Node | int, int]]]


@dataclasses.dataclass(frozen=True)
class OperationUse:
    """An operation in which what is computed from parameters meets samples.

    Attributes:
        node: The operation.
        params: Names of parameters, by the input through which it depends on them.
        rows: Which rows of a product belong to which sample; None: no product.
    """

    node: Node
    params: Mapping[int, tuple[str, ...]]
    rows: Rows | None = None

    @property
    def names(self) -> list[str]:
        """The names of all parameters."""
        return list(dict.fromkeys(n for names in self.params.values() for n in names))


@dataclasses.dataclass(frozen=True)
class OperationCall(Call):
    """An operation as a `Call`, which `by_operation` is the rule of.

    Attributes:
        use: The operation.
        params: All parameters that it may depend on, by name.
        num_samples: B.
    """

    use: OperationUse
    params: Mapping[str, nn.Parameter]
    num_samples: int

    @property
    def runs_nodes(self) -> bool:
        """Whether its rule runs the node, after the pass."""
        operation = rules.operation_of(self.use.node)
        return operation is not None and operation.runs


def by_operation(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Returns the contributions of an `OperationCall`, by the parameter's name."""
    assert isinstance(call, OperationCall)
    use, parts = call.use, defaultdict(list)
    for slot, names in use.params.items():
        if use.rows is not None:
            found = products.contribution(use.node, slot, grad, use.rows)
        else:
            operation = rules.operation_of(use.node)
            assert operation is not None
            found = operation.rule(use.node, slot, grad, call.batch_dim)
        found = forms.regroup(forms.widened(found), call.num_samples)
        below, number = use.node.next_functions[slot]
        assert below is not None
        wanted = {name: call.params[name] for name in names}
        for name, part in take_down(GradientEdge(below, number), found, wanted).items():
            parts[name].append(part)
    return {name: _one(each, call.params[name]) for name, each in parts.items()}


def _one(parts: list[Contribution], param: nn.Parameter) -> Contribution:
    if len(parts) == 1:
        return parts[0]
    shape = tuple(param.shape)
    return Dense(forms.summed(rules.formed(each, shape) for each in parts))


def take_down(
    edge: GradientEdge, found: Contribution, wanted: Mapping[str, nn.Parameter]
) -> dict[str, Contribution]:
    """Takes what a tensor gets of each sample to the parameters that it depends on."""
    names = {id(param): name for name, param in wanted.items()}
    parts: dict[str, list[Contribution]] = defaultdict(list)
    stack: list[tuple[GradientEdge, Found]]
    stack = [(edge, products.Arranged(found) if isinstance(found, Outer) else found)]
    steps = 0
    while stack:
        edge, here = stack.pop()
        node = edge.node
        shape = tuple(node._input_metadata[edge.output_nr].shape)
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) in names:
                parts[names[id(variable)]].append(_of_shape(here, shape))
            continue
        steps += 1
        below = _below(node, shape, here) if steps < _MOST_STEPS else None
        if below is not None:
            stack += below
            continue
        for name, part in _by_autograd(edge, _of_shape(here, shape), wanted).items():
            parts[name].append(part)
    missing = [name for name in wanted if name not in parts]
    if missing:
        raise Refusal(f"it does not depend on {', '.join(missing)}")
    return {name: _one(parts[name], param) for name, param in wanted.items()}


def _of_shape(found: Found, shape: tuple[int, ...]) -> Contribution:
    if isinstance(found, products.Arranged):
        return found.of(shape)
    if isinstance(found, Dense):
        return Dense(found.values.reshape(-1, *shape))
    return found


def _below(
    node: Node, shape: tuple[int, ...], found: Found
) -> list[tuple[GradientEdge, Found]] | None:
    """Returns what a node's inputs get where it gets this; None: autograd knows."""
    name = node.name()
    inputs = [
        (slot, GradientEdge(below, number))
        for slot, (below, number) in enumerate(node.next_functions)
        if below is not None
    ]
    if name == "MmBackward0":
        if not isinstance(found, products.Arranged):
            return None
        matrix = found.of(shape)
        if not isinstance(matrix, Outer) or matrix.groups > 1:
            return None
        return [
            (edge, products.through_product(node, slot, matrix))
            for slot, edge in inputs
        ]
    times = [rules.times_of(node, slot) for slot, _ in inputs]
    if all(each is not None for each in times):
        return [
            (edge, _multiplied(found, shape, each))
            for (_, edge), each in zip(inputs, times)
            if each is not None
        ]
    if len(inputs) > 1:
        return None
    [(_, edge)] = inputs
    order = rules.order_of(node)
    if order is not None:
        if isinstance(found, products.Arranged):
            permuted = found.permuted(shape, order)
            return None if permuted is None else [(edge, permuted)]
        if isinstance(found, Dense):
            before = [1 + order.index(dim) for dim in range(len(order))]
            values = found.values.reshape(-1, *shape)
            return [(edge, Dense(values.permute(0, *before)))]
        return None
    if name == "EmbeddingBackward0" and isinstance(found, Dense):
        index = rules.saved(node, "indices")
        index = index.expand(len(found.values), *index.shape)
        values = found.values.reshape(*index.shape, -1)
        return [(edge, rules.lookup(node, index, values))]
    if name in _UNCHANGED and isinstance(found, (Dense, products.Arranged)):
        return [(edge, found)]
    return None


def _multiplied(
    found: Found, shape: tuple[int, ...], times: float | torch.Tensor
) -> Found:
    """Returns what a tensor of this shape gets, times a number or numbers in it."""
    if isinstance(times, float):
        if isinstance(found, products.Arranged):
            return found.multiplied(times)
        return forms.multiplied(found, times)
    found = _of_shape(found, shape)
    own = rules.aligned(tuple(times.shape), shape)
    if isinstance(found, Outer) and math.prod(own) in (own[0], math.prod(own[1:])):
        return products.Arranged(products.scaled(found, times.reshape(own)))
    values = rules.formed(found, shape)
    return Dense(values * times.to(values.dtype))


def _by_autograd(
    edge: GradientEdge, found: Contribution, wanted: Mapping[str, nn.Parameter]
) -> dict[str, Contribution]:
    data = edge.node._input_metadata[edge.output_nr]
    values = rules.formed(found, tuple(data.shape)).to(data.dtype)
    inputs = list(wanted.values())
    with xla_replica.AccumulationHook.paused(inputs):
        gradients = torch.autograd.grad(
            [edge],
            inputs,
            [values],
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
    return {n: Dense(grad) for n, grad in zip(wanted, gradients) if grad is not None}


@dataclasses.dataclass
class Search:
    """The search for uses of parameters, from each to where it meets samples.

    On the way nothing may come in that depends on samples, such as their mean: what
    is taken down that way is each loss's gradient, coupled or not, and the comparison
    would not notice.

    Attributes:
        losses: ``(B,)``.
        consumers: What takes the tensor of each node; integers are calls with rules.
        outputs: The nodes that made what calls with rules returned.
        constant: Nodes that are known not to depend on samples.
        batch_dim: The dimension that counts samples.
        known: Where the model's tensors are stored, see `registry.memory`.
        may_read: Whether operations may be asked for what they have saved.
        believed: What else the result depends on than the graph and shapes.
    """

    losses: torch.Tensor
    consumers: Consumers
    outputs: Collection[Node]
    constant: Collection[Node]
    batch_dim: int
    known: Collection[int]
    may_read: bool

    def __post_init__(self) -> None:
        # What was believed because of where operations have saved tensors, and not of
        # the graph and shapes alone.
        self.believed: list[tuple[Node, Belief]] = []
        # Nodes that may depend on samples, as far as that was looked at.
        self._of_data: set[Node] = set()

    def of(
        self, params: Mapping[str, nn.Parameter]
    ) -> tuple[list[OperationUse], dict[str, str]]:
        """Returns uses by operations with rules, and why other parameters have none."""
        by_node: dict[Node, dict[int, list[str]]] = {}
        reasons: dict[str, str] = {}
        for name, param in params.items():
            met: list[tuple[Node, int]] = []
            leaf = torch.autograd.graph.get_gradient_edge(param).node
            if (reason := self._climb(leaf, met)) is not None:
                reasons[name] = reason
                continue
            for node, slot in met:
                by_node.setdefault(node, {}).setdefault(slot, []).append(name)
        found = [
            OperationUse(
                node,
                {slot: tuple(names) for slot, names in slots.items()},
                self._rows_of(node),
            )
            for node, slots in by_node.items()
        ]
        return found, reasons

    def _climb(self, leaf: Node, met: list[tuple[Node, int]]) -> str | None:
        """Adds nodes and inputs to ``met``; returns what is in the way, if anything."""
        stack, seen = [leaf], {leaf}
        while stack:
            for taker, slot in self.consumers.get(stack.pop(), ()):
                if isinstance(taker, int):
                    return "what is computed from it is the input of a module"
                if self._meets(taker, slot):
                    operation = rules.operation_of(taker)
                    reads = operation is None or operation.reads
                    if reads and not self.may_read:
                        return "what its operation has saved is kept by hooks"
                    runs = operation is not None and operation.runs
                    if not runs or rules.keeps_rows(taker, slot):
                        met.append((taker, slot))
                        continue
                if taker is self.losses.grad_fn or len(seen) > _LONGEST_SEARCH:
                    return "no operation that meets samples has a rule"
                if isinstance(taker, BackwardCFunction):
                    return f"{taker.name()} may do anything with it"
                if self._mixes(taker, slot):
                    return f"{taker.name()} mixes it with samples, and has no rule"
                if taker.name() in _BY_DATA and not self._is_constant(taker):
                    return f"{taker.name()} may take rows by samples' indices"
                if None in (n for n, _ in taker.next_functions):
                    if not self.may_read:
                        return "what its operation has saved is kept by hooks"
                    if not self._believes(taker, is_known):
                        return f"{taker.name()} mixes it with what may be samples"
                if taker not in seen:
                    seen.add(taker)
                    stack.append(taker)
        return None

    def _mixes(self, node: Node, slot: int) -> bool:
        """Returns whether another input of a node depends on samples, as is known."""
        below = [n for i, (n, _) in enumerate(node.next_functions) if i != slot]
        stack, seen = below, set(below)
        while stack:
            current = stack.pop()
            if current is None:
                continue
            if (
                current in self.outputs
                or len(seen) > _LONGEST_SEARCH
                or isinstance(current, BackwardCFunction)
                or (
                    any(
                        self._has_shapes_of_meeting(current, i)
                        for i, (n, _) in enumerate(current.next_functions)
                        if n is not None
                    )
                    and not _of_parameters_alone(current, -1, self._of_data)
                )
            ):
                return True
            new = {n for n, _ in current.next_functions} - seen
            seen |= new
            stack.extend(new)
        return False

    def _is_constant(self, node: Node) -> bool:
        """Returns whether the rows of a lookup do not belong to samples."""
        shape = rules.output_shape(node)
        dim = self.batch_dim + (len(shape) if self.batch_dim < 0 else 0)
        rows, count = shape[dim] if dim < len(shape) else 1, len(self.losses)
        if count == 1 or rows % count:
            return True
        return node in self.constant or self._believes(node, is_own)

    def _believes(self, node: Node, belief: Belief) -> bool:
        found = belief(node, self.known)
        if found:
            self.believed.append((node, belief))
        return found

    def _meets(self, node: Node, slot: int) -> bool:
        if node in self.constant or not self._has_shapes_of_meeting(node, slot):
            return False
        return not _of_parameters_alone(node, slot, self._of_data)

    def _has_shapes_of_meeting(self, node: Node, slot: int) -> bool:
        """Returns whether shapes say that the input at ``slot`` meets samples here."""
        where = (len(self.losses), self.batch_dim)
        if node.name() in products.PRODUCTS:
            return products.meets_samples(node, slot, self._rows_of(node))
        operation = rules.operation_of(node)
        if operation is None:
            return False
        return operation.meets_samples(node, slot, *where) or (
            rules.copies_for_samples(node, slot, *where)
            and not is_broadcast(node, self.consumers, *where)
        )

    def _rows_of(self, node: Node) -> products.Rows | None:
        if node.name() not in products.PRODUCTS:
            return None
        where = (len(self.losses), self.batch_dim)
        return products.rows_of(node, self.consumers, *where)


def is_own(node: Node, known: Collection[int]) -> bool:
    """Returns whether all that an operation has saved is what the model owns."""
    saved = (getattr(node, n) for n in dir(node) if n.startswith("_saved_"))
    return all(registry.memory(each) in known for each in tensors_in(list(saved)))


def is_known(node: Node, known: Collection[int]) -> bool:
    """Returns whether what an operation has saved can be told from samples.

    That are single numbers, integers, and what the model owns. What has a graph is
    looked at elsewhere, and what the operation has computed depends on nothing else
    than what it took.
    """
    names = (n for n in dir(node) if n.startswith("_saved_"))
    saved = (getattr(node, n) for n in names if not n.startswith("_saved_result"))
    return all(
        each.numel() == 1
        or each.requires_grad
        or not each.is_floating_point()
        or registry.memory(each) in known
        for each in saved
        if isinstance(each, torch.Tensor)
    )


def is_broadcast(
    node: Node, consumers: Consumers, num_samples: int, batch_dim: int
) -> bool:
    """Returns whether what a node made is nowhere used but broadcast over the samples.

    Then it has no rows for samples, whatever its shape. Views, and what has one row in
    the place of samples, are followed to where it is.
    """
    stack, seen, found = [node], {node}, False
    while stack and len(seen) < _LONGEST_SEARCH:
        for taker, slot in consumers.get(stack.pop(), ()):
            if isinstance(taker, int):
                return False
            operation, shape = rules.operation_of(taker), rules.output_shape(taker)
            at = batch_dim if batch_dim >= 0 else batch_dim + len(shape)
            if (
                operation is not None
                and operation.broadcasts
                and operation.meets_samples(taker, slot, num_samples, batch_dim)
            ):
                found = True
            elif taker.name() in (*_UNCHANGED, *_MOVED) or (
                0 <= at < len(shape) and shape[at] == 1
            ):
                if taker not in seen:
                    seen.add(taker)
                    stack.append(taker)
            else:
                return False
    return found and not stack


def _of_parameters_alone(node: Node, slot: int, of_data: set[Node]) -> bool:
    """Returns whether all other inputs are certainly computed from parameters alone.

    ``of_data`` has nodes that are known not to be, and takes new ones.
    """
    others = [n for i, (n, _) in enumerate(node.next_functions) if i != slot]
    stack, seen = list(others), set(others)
    while stack:
        below = stack.pop()
        # An input without a graph may be data, and so may indices.
        known = below is None or below in of_data or below.name() in _BY_DATA
        if known or len(seen) > _LONGEST_SEARCH:
            of_data.add(node)
            return False
        new = {n for n, _ in below.next_functions} - seen
        seen |= new
        stack.extend(new)
    return len(others) > 0
