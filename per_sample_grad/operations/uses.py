"""Uses of parameters outside known modules, as operations that have a rule.

From a parameter the search climbs the graph towards the losses. What is computed from
parameters alone, such as a table of positions, a normalised weight or ``1 + weight``,
does not depend on samples. It meets samples in an operation that broadcasts it over
them, looks rows up in it or multiplies with it. There the gradient still has a row for
each sample, and a rule of that operation says what each contributes. From there the
contribution goes down to the parameter (see `computed`).

That shapes alone decide where samples are met may be wrong. The comparison with
autograd notices that, as it does for rules of modules.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Collection, Container, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.layers.registry import Call
from per_sample_grad.operations import products, rules
from per_sample_grad.operations.computed import take_down
from per_sample_grad.operations.products import Consumers, Rows
from xla_replica.common.trees import tensors_in

# How many operations the search climbs, at most, for one parameter.
_LONGEST_SEARCH = 1000
# Nodes that bring dimensions into another order.
_MOVED = ("PermuteBackward0", "TransposeBackward0", "TBackward0")
# Nodes that depend on more than their inputs in the graph.
_BY_DATA = (
    "EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0", "GatherBackward0",
    "IndexPutBackward0",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class OperationUse:
    """An operation in which what is computed from parameters meets samples.

    Attributes:
        node: The operation.
        params: Names of parameters, by the input through which it depends on them.
        rows: Which rows of a product belong to which sample; None: no product.
    """

    node: Node
    params: Mapping[int, Sequence[str]]
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
    def runs_nodes(self) -> bool:  # type: ignore[override]
        """Whether its rule runs the node, after the pass."""
        operation = rules.operation_of(self.use.node)
        return operation is not None and operation.runs


def by_operation(call: Call, grad: torch.Tensor) -> dict[str, list[Contribution]]:
    """Returns the contributions of an `OperationCall`, by the parameter's name."""
    assert isinstance(call, OperationCall)
    use = call.use
    parts: dict[str, list[Contribution]] = defaultdict(list)
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
        down = take_down(GradientEdge(below, number), found, wanted)
        for name, each in down.items():
            parts[name] += each
    return dict(parts)


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
        known: What the model owns, see `registry.Owned`.
        may_read: Whether operations may be asked for what they have saved.
    """

    losses: torch.Tensor
    consumers: Consumers
    outputs: Collection[Node]
    constant: Collection[Node]
    batch_dim: int
    known: Container[torch.Tensor]
    may_read: bool

    def __post_init__(self) -> None:
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
        _join(by_node)
        nodes = by_node.items()
        found = [OperationUse(n, slots, self._rows_of(n)) for n, slots in nodes]
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
                    if not is_known(taker, self.known):
                        return f"{taker.name()} mixes it with what may be samples"
                if taker not in seen:
                    seen.add(taker)
                    stack.append(taker)
        return None

    def _mixes(self, node: Node, slot: int) -> bool:
        """Returns whether another input of a node depends on samples, as is known."""
        for count, each in enumerate(rules.below(_others(node, slot))):
            if each is not None and (
                count > _LONGEST_SEARCH
                or each in self.outputs
                or isinstance(each, BackwardCFunction)
                or self._meets_at_any_input(each)
            ):
                return True
        return False

    def _meets_at_any_input(self, node: Node) -> bool:
        slots = [i for i, (n, _) in enumerate(node.next_functions) if n is not None]
        return any(self._has_shapes_of_meeting(node, slot) for slot in slots) and (
            not _of_parameters_alone(node, None, self._of_data)
        )

    def _is_constant(self, node: Node) -> bool:
        """Returns whether the rows of a lookup do not belong to samples."""
        shape = rules.output_shape(node)
        dim = self.batch_dim + (len(shape) if self.batch_dim < 0 else 0)
        rows, count = shape[dim] if dim < len(shape) else 1, len(self.losses)
        if count == 1 or rows % count:
            return True
        return node in self.constant or is_own(node, self.known)

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


@functools.cache
def _saved_by(kind: type[Node]) -> tuple[str, ...]:
    """Returns the names of what operations of a kind save; listing them takes time."""
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def is_own(node: Node, known: Container[torch.Tensor]) -> bool:
    """Returns whether all that an operation has saved is what the model owns."""
    saved = (getattr(node, name) for name in _saved_by(type(node)))
    return all(each in known for each in tensors_in(list(saved)))


def is_known(node: Node, known: Container[torch.Tensor]) -> bool:
    """Returns whether what an operation has saved can be told from samples.

    That are single numbers, integers, and what the model owns. What has a graph is
    looked at elsewhere, and what the operation has computed depends on nothing else
    than what it took.
    """
    names = _saved_by(type(node))
    saved = (getattr(node, n) for n in names if not n.startswith("_saved_result"))
    return all(
        each.numel() == 1
        or each.requires_grad
        or not each.is_floating_point()
        or each in known
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
            elif taker.name() in (*rules.UNCHANGED, *_MOVED) or (
                0 <= at < len(shape) and shape[at] == 1
            ):
                if taker not in seen:
                    seen.add(taker)
                    stack.append(taker)
            else:
                return False
    return found and not stack


def _join(found: dict[Node, dict[int, list[str]]]) -> None:
    """Leaves out nodes that what another node takes is computed by.

    Where there is one sample, each repetition of rows looks like one over samples. What
    goes down from the other node comes by the parameters anyway.
    """
    for outer, slots in list(found.items()):
        for slot, names in slots.items():
            below = set(rules.below([outer.next_functions[slot][0]]))
            for inner in found.keys() & below:
                for others in found.pop(inner).values():
                    names += [name for name in others if name not in names]


def _others(node: Node, slot: int | None) -> list[Node | None]:
    """Returns what made a node's inputs but the one at ``slot``."""
    return [n for i, (n, _) in enumerate(node.next_functions) if i != slot]


def _of_parameters_alone(node: Node, slot: int | None, of_data: set[Node]) -> bool:
    """Returns whether all other inputs are certainly computed from parameters alone.

    ``of_data`` has nodes that are known not to be, and takes new ones.
    """
    others = _others(node, slot)
    for count, each in enumerate(rules.below(others)):
        # An input without a graph may be data, and so may indices.
        known = each is None or each in of_data or each.name() in _BY_DATA
        if known or count > _LONGEST_SEARCH:
            of_data.add(node)
            return False
    return len(others) > 0
