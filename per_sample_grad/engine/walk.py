"""One walk through the graph, from the losses to whatever accounts for the parameters.

It begins where samples are known to be, at the losses, and takes with it where they are
in each tensor, by the `table` of operations. It steps over calls of modules that have a
rule. Where an operation takes something that is the same for all samples, and that is
computed from parameters alone, the two meet: the operation accounts for these
parameters. A parameter that is reached nevertheless has a use that nothing accounts
for. That finds functional uses of a weight, parametrizations, ties, parameters of
MultiheadAttention, and outputs that were replaced by an in-place operation on a view.

An operation whose layout is unknown may mix any two samples, depending on its data, or
with a coefficient that happens to be zero. Below it shapes say where samples are. What
is found there is only believed where it is compared, and is compared in every pass:
what has been proven of other data says nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from per_sample_grad.engine.comparison import PROVEN, Proof
from per_sample_grad.engine.recording import RecordedCall, RecordedModule, Recorder
from per_sample_grad.engine.settings import Settings
from per_sample_grad.errors import CoverageError
from per_sample_grad.layers.registry import Owned, is_of_torch, why_no_rule
from per_sample_grad.operations import contributions, layouts, nodes
from per_sample_grad.operations.contributions import ContributionRule
from per_sample_grad.operations.layouts import Rows, Shape, by_shape, through_view
from per_sample_grad.operations.table import layout_of, operation_of

# Nodes that depend on more than their inputs in the graph.
_BY_DATA = (
    "EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0", "GatherBackward0",
    "IndexPutBackward0",
)  # fmt: skip
# Nodes that bring dimensions into another order, or only change a shape.
_MOVES = {*nodes.UNCHANGED, "PermuteBackward0", "TransposeBackward0", "TBackward0"}
# Nodes that take one sample out of all.
_TAKE = ("UnbindBackward0", "SelectBackward0")
_CHANGED = (
    "an input of {}, or a tensor of it that its rule reads, was changed in place after "
    "the module had used it: use an operation that is not in place, or change weights "
    "after the backward pass"
)
_KEPT_BY_HOOKS = "what its operation has saved is kept by hooks"


class Table(NamedTuple):
    """What a backward pass is given.

    Attributes:
        nodes: The nodes that it comes by, each after those below it.
        calls: Calls of modules, and operations, that account for parameters.
        problems: Why parameters have uses without a call, by name.
        key: What must be equal for one proof to hold for two captures.
        proof: What has been proven of this structure; None: nothing.
        astray: Parameters of calls whose samples may not be where their rule says, as
            data decide: what is proven of them holds for no other data.
        is_structural: Whether ``calls`` and ``astray`` are the same for all data.
        others: What else takes a gradient.
    """

    nodes: list[Node]
    calls: list[RecordedCall]
    problems: Mapping[str, str]
    key: Hashable
    proof: Proof | None
    astray: Collection[str]
    is_structural: bool
    others: list[torch.Tensor]


# What accounts for the gradients of no samples.
NOTHING = Table([], [], {}, None, None, (), False, [])


def walk(settings: Settings, losses: torch.Tensor, recorder: Recorder) -> Table:
    """Finds what accounts for every parameter in what was recorded.

    Raises:
        PerSampleError: An input was changed in place, or parameters are hidden.
    """
    passed = nodes.backward_nodes(losses.grad_fn)
    reached = {*passed}
    calls = [each for each in recorder.calls if each.output.node in reached]
    proven = PROVEN.get(settings.model, {})
    structure = (
        tuple([each.identity for each in recorder.calls]),
        (losses.shape, losses.dtype, losses.device, settings.default_batch_dim),
        tuple([(name, param.shape) for name, param in settings.params.items()]),
        nodes.structure(passed, settings.names),
    )
    key: Hashable = (structure, (), ())
    proof = proven.get(key)
    problems: Mapping[str, str] = {}
    if proof is not None and proof.is_structural and not recorder.unrecorded:
        astray, is_structural = proof.astray, True
    else:
        found = _Walk(settings, losses, recorder, passed)
        every, calls = calls, [each for each in calls if found.reaches(each)]
        found.refuse_hidden(calls)
        by_operations, problems = found.operations(), found.explained_problems()
        is_structural = found.is_structural and len(every) == len(calls)
        is_structural &= not (by_operations or problems)
        operations = tuple([each.identity for each in by_operations])
        key = (structure, operations, tuple(problems))
        proof = proven.get(key)
        if settings.check == "never" and proof is None:
            # That shapes say where samples are is only believed when it is compared.
            problems = {
                name: f'{each.owner} is only believed without check="never"'
                for each in by_operations
                for name in each.owner.names
            } | problems
            by_operations = []
        calls += by_operations
        astray = frozenset(found.astray if len(losses) > 1 else ())
    for call in calls:
        call.versions.refuse_changes(_CHANGED, call.owner)
    leaves = [getattr(node, "variable", None) for node in passed]
    others = [x for x in leaves if x is not None and id(x) not in settings.names]
    return Table(passed, calls, problems, key, proof, astray, is_structural, others)


class _Place(NamedTuple):
    """A tensor on the way: an output of a node.

    Attributes:
        node: The node.
        number: Of the output.
        rows: Where it has the samples; None: it must be the same for all.
        is_certain: Whether that is so whatever the data.
        why: Why nothing accounts for a parameter that is reached from here.
        inside: Of a call whose module is not known to keep samples apart: the nodes of
            its inputs, where the way through it ends, and its parameters. None: outside
            of such calls.
        is_single: Whether it is of one sample, as what is stacked to the losses is.
    """

    node: Node
    number: int
    rows: Rows | None
    is_certain: bool
    why: str
    inside: tuple[frozenset[Node], tuple[str, ...]] | None = None
    is_single: bool = False


@dataclasses.dataclass
class _Walk:
    """The walk, and what it has found.

    Attributes:
        settings: Those of the capture.
        losses: ``(B,)``.
        recorder: What was recorded.
        passed: The nodes of the graph, each after those below it.
        problems: Why parameters have uses without a call, by name.
        astray: As in `Table`.
        is_structural: Whether nothing was decided by data.
    """

    settings: Settings
    losses: torch.Tensor
    recorder: Recorder
    passed: Sequence[Node]

    def __post_init__(self) -> None:
        """Goes all ways from the losses."""
        self.problems: dict[str, str] = {}
        self.astray: set[str] = set()
        self._num_samples = len(self.losses)
        self._model_params = {id(param) for param in self.settings.model.parameters()}
        self._custom: str | None = None
        self._reached: set[Node] = set()
        # Operations that account for parameters: their rules, where samples are, and
        # the parameters by input.
        self._uses: dict[Node, tuple[ContributionRule, Rows, dict[int, list[str]]]] = {}
        # Calls that return the same for all samples: what rows of a table or buffers of
        # the model are computed from, and not what may be computed from the samples.
        # They are a part of what is computed from parameters alone.
        self._constant: list[RecordedCall] = []
        # Of calls with the same output (a module that ends with another) the last one.
        self._calls: dict[Node, RecordedCall] = {}
        for each in self.recorder.calls:
            if self._is_constant(each):
                self._constant.append(each)
            else:
                self._calls[each.output.node] = each
        self._below = self._parameters_below()
        if any(self._below.values()):
            # A checkpoint that calls no module with parameters was not noticed.
            self.recorder.saved_by_hooks |= nodes.is_saved_by_hooks(self.passed)
        self._may_read = not self.recorder.saved_by_hooks
        by_indices = any(node.name() == "IndexBackward0" for node in self.passed)
        self.is_structural = not self._constant and not by_indices
        self._run()

    @functools.cached_property
    def _known(self) -> Owned:
        return Owned(self.settings.model)

    @functools.cached_property
    def _same(self) -> Collection[Node]:
        """Nodes inside of calls that are said to return the same for all samples."""
        inside = [
            nodes.backward_nodes(each.output.node, [edge.node for edge in each.inputs])
            for each in self._constant
            if not each.has_batch
        ]
        return set().union(*inside)

    def _is_constant(self, recorded: RecordedCall) -> bool:
        """Returns whether a call has no rows, and took no numbers of unknown origin.

        Known are integers, such as the ids of positions, what has a graph, which is
        looked at later, and what the model owns.
        """
        if not recorded.has_batch:
            return True
        if self._guess(recorded.shape, recorded.call.batch_dim) is not None:
            return False
        unknown = [each for each in recorded.floats if each not in self._known]
        return len(unknown) <= len(recorded.inputs)

    def _looks_up(self, recorded: RecordedCall) -> bool:
        """Returns whether a call may have looked up what is the same for all samples.

        A table of positions may have as many rows as there are samples, or a multiple.
        """
        return self._num_samples > 1 and not recorded.floats

    def _parameters_below(self) -> dict[Node, frozenset[str]]:
        """Returns the parameters that each node depends on outside of calls."""
        below: dict[Node, frozenset[str]] = {}
        for node in self.passed:
            call = self._calls.get(node)
            if call is not None:
                names = call.owner.names if self._looks_up(call) else ()
                below[node] = frozenset(names)
                continue
            name = self.settings.names.get(id(getattr(node, "variable", None)))
            found = [below[each] for each, _ in node.next_functions if each is not None]
            below[node] = frozenset([name] if name else ()).union(*filter(None, found))
        return below

    def _run(self) -> None:
        root, why = self.losses.grad_fn, "no operation that meets samples has a rule"
        stack = [] if root is None else [_Place(root, 0, Rows(0), True, why)]
        seen: set[_Place] = set()
        while stack:
            for place in self._step(stack.pop()):
                known = place._replace(why="")  # of which the first one counts
                if known not in seen:
                    seen.add(known)
                    stack.append(place)

    def _step(self, place: _Place) -> list[_Place]:
        """Returns what a place depends on, except for what is accounted for there."""
        node = place.node
        if place.inside is not None and node in place.inside[0]:
            place = place._replace(inside=None)
        is_outside, variable = place.inside is None, getattr(node, "variable", None)
        if variable is not None:
            name = self.settings.names.get(id(variable))
            if name is not None and is_outside:
                self.problems.setdefault(name, place.why)
            return []
        call = self._calls.get(node) if is_outside else None
        # Rows that are the same for all samples are a part of what meets them.
        is_table = place.rows is None and place.is_certain
        if call is not None and not (is_table and self._looks_up(call)):
            place = place._replace(is_certain=self._reach_call(call, place))
            if is_of_torch(call.call.module, call.owner.rule):
                return self._inputs_of(call, place.is_certain)
            ends = frozenset([edge.node for edge in call.inputs])
            place = place._replace(inside=(ends, call.owner.names))
        elif is_outside and isinstance(node, BackwardCFunction):
            self._custom = node.name()
            # That runs another graph inside, in which parameters would not be seen.
            if self._custom == "CheckpointFunctionBackward":
                raise CoverageError(
                    "torch.utils.checkpoint with use_reentrant=True hides parameters "
                    "from the graph: pass use_reentrant=False"
                )
        return self._inputs_below(place)

    def _reach_call(self, call: RecordedCall, place: _Place) -> bool:
        """Returns whether samples are certainly where the rule takes them to be."""
        self._reached.add(place.node)
        found: Rows | None = None
        if place.rows is not None and place.is_certain:
            shape = nodes.output_shape(place.node, place.number)
            with contextlib.suppress(layouts.Unknown):
                found = through_view(shape, place.rows, call.shape, self._num_samples)
        is_certain = found == self._guess(call.shape, call.call.batch_dim) is not None
        if not is_certain:
            self.astray.update(call.owner.names)
        return is_certain

    def _inputs_of(self, call: RecordedCall, is_certain: bool) -> list[_Place]:
        """Returns a layer's inputs, each with its samples if it has any."""
        why, found = "what is computed from it is the input of a module", []
        for node, number, *_ in call.inputs:
            shape = nodes.output_shape(node, number)
            rows = self._guess(shape, call.call.batch_dim)
            # Of one dimension are weights within bags.
            found.append(_Place(node, number, rows, is_certain and len(shape) > 1, why))
        return found

    def _guess(self, shape: Shape | None, dim: int | None = None) -> Rows | None:
        """Returns where a tensor has its samples as far as shapes tell."""
        dim = self.settings.default_batch_dim if dim is None else dim
        return None if shape is None else by_shape(shape, dim, self._num_samples)

    def _inputs_below(self, place: _Place) -> list[_Place]:
        """Returns the inputs of an operation, except for what it accounts for."""
        node, rows, certain = place.node, place.rows, place.is_certain
        shapes = nodes.input_shapes(node)
        if rows is None and not (certain or place.is_single):
            rows = self._guess(nodes.output_shape(node, place.number))
            place = place._replace(rows=rows)
        found: list[Rows | None] | None = [None] * len(shapes)
        if rows is not None:
            num_samples, may_read = self._num_samples, self._may_read
            found = layout_of(node, place.number, rows, num_samples, may_read)
        is_known, is_single = found is not None, place.is_single
        if found is None:
            certain, is_single = False, node.name() == "StackBackward0"
            found = [None if is_single else self._guess(each) for each in shapes]
        elif is_single and node.name() in _TAKE:
            is_single, found = False, [self._guess(each) for each in shapes]
        if place.inside is not None and None in shapes and not (rows and certain):
            self.astray.update(place.inside[1])  # samples may come in without a graph
        inputs = []
        for slot, ((each, number), at) in enumerate(zip(node.next_functions, found)):
            if each is None:
                continue
            why, is_same = place.why, rows is not None and at is None
            if is_same and place.inside is None and self._below[each]:
                why = self._meet(place, slot, each, is_known)
            if why:
                below = place._replace(node=each, number=number, rows=at, why=why)
                inputs.append(below._replace(is_certain=certain, is_single=is_single))
        return inputs

    def _meet(self, place: _Place, slot: int, below: Node, is_known: bool) -> str:
        """Lets an operation account for the parameters below an input, if it can.

        Returns why it does not, or nothing.
        """
        node, operation = place.node, operation_of(place.node)
        if reason := self._why_of_samples(below):
            return reason
        rule = None if operation is None else operation.contribution
        if not is_known or operation is None or rule is None or place.rows is None:
            return _mixes(node)
        if operation.reads and not self._may_read:
            return _KEPT_BY_HOOKS
        runs_node = rule is contributions.by_its_node
        if runs_node and not contributions.keeps_rows(node, slot):
            return _mixes(node)
        names = sorted(self._below[below])
        use = self._uses.setdefault(node, (rule, place.rows, {}))
        use[-1][slot] = names
        if not place.is_certain:
            self.astray.update(names)
        return ""

    def _why_of_samples(self, top: Node) -> str:
        """Returns why what a node made may depend on samples; nothing: it does not."""
        stack = [(top, True)]
        seen = set(stack)
        while stack:
            node, is_moved = stack.pop()
            if reason := self._why_by_itself(node, top, is_moved):
                return reason
            is_moved = is_moved and (node.name() in _MOVES or self._is_one_row(node))
            below = [(each, is_moved) for each, _ in node.next_functions if each]
            new = [each for each in below if each not in seen]
            seen.update(new)
            stack += new
        return ""

    def _is_one_row(self, node: Node) -> bool:
        """Returns whether an operation has one row in the place of those of samples."""
        dim = self.settings.default_batch_dim
        shapes = nodes.output_shape(node), *filter(None, nodes.input_shapes(node))
        return all(-len(x) <= dim < len(x) and x[dim] == 1 for x in shapes)

    def _why_by_itself(self, node: Node, top: Node, is_moved: bool) -> str:
        """Returns why a node may depend on samples, but for its inputs with a graph.

        ``is_moved`` says that it has the rows of ``top``, which are those of a table.
        """
        name, variable = node.name(), getattr(node, "variable", None)
        if variable is not None:
            is_own = id(variable) in self._model_params
            return "" if is_own or not self._guess(variable.shape) else _mixes(top)
        if isinstance(node, BackwardCFunction):
            return f"{name} may do anything with it"
        call = self._calls.get(node)
        if call is not None and not (self._looks_up(call) and is_moved):
            return _mixes(top)
        if node in self._same:
            return ""
        if name in _BY_DATA and self._num_samples > 1 and not is_moved:
            has_rows = self._guess(nodes.output_shape(node))
            is_read = self._may_read and contributions.is_known(
                node, self._known, also_indices=True
            )
            if has_rows and not is_read:
                return f"{name} may take rows by samples' indices"
        if None in nodes.input_shapes(node):
            if not self._may_read:
                return _KEPT_BY_HOOKS
            if not contributions.is_known(node, self._known):
                return f"{name} mixes it with what may be samples"
        return ""

    def reaches(self, recorded: RecordedCall) -> bool:
        """Returns whether the losses depend on a call, outside of others."""
        node = recorded.output.node
        return node in self._reached and self._calls.get(node) is recorded

    def refuse_hidden(self, calls: Sequence[RecordedCall]) -> None:
        """Raises CoverageError for parameters used only within an autograd.Function."""
        seen = {name for call in calls for name in call.owner.names}
        hidden = sorted(self.recorder.unrecorded - seen - self.problems.keys())
        if hidden and self._custom is not None:
            raise CoverageError(
                f"modules with {', '.join(hidden)} were called without gradients, "
                f"perhaps in the torch.autograd.Function {self._custom}: call them "
                "outside of it (for checkpoints: use_reentrant=False), or leave them "
                "out if the losses do not depend on them (params=)"
            )

    def operations(self) -> list[RecordedCall]:
        """Returns operations, each as a call of the module with its first parameter."""
        model, params = self.settings.model, self.settings.params
        calls = []
        for node, (rule, rows, slots) in self._uses.items():
            names = tuple(dict.fromkeys(n for each in slots.values() for n in each))
            owner = names[0].rpartition(".")[0]
            module = model.get_submodule(owner)
            kind = f"{node.name().removesuffix('Backward0')} in {type(module).__name__}"
            by_name = {name: name for name in names}
            recorded = RecordedModule(
                owner, kind, contributions.by_operation, by_name, names
            )
            own = {slot: {n: params[n] for n in each} for slot, each in slots.items()}
            call = contributions.OperationCall(
                module, (), {}, rows.axis, node, rule, rows, own, self._num_samples
            )
            edge, shape = GradientEdge(node, 0), torch.Size(nodes.output_shape(node))
            is_late = rule is contributions.by_its_node
            calls.append(RecordedCall(recorded, call, edge, shape, is_late=is_late))
        return calls

    def explained_problems(self) -> dict[str, str]:
        """Returns why parameters have uses that nothing accounts for, by name."""
        found = {}
        for name, why in self.problems.items():
            owner = name.rpartition(".")[0]
            module = self.settings.model.get_submodule(owner)
            kind = type(module).__name__
            other = f"{kind} {owner!r} has a rule, but this use is not its own call"
            no_rule = why_no_rule(module) or other
            found[name] = f"a use outside any module with a rule ({no_rule}; {why})"
        return found


def _mixes(node: Node) -> str:
    if node.name() == "CompiledFunctionBackward":
        return "call the model in the capture, not a compiled function"
    return f"{node.name()} mixes it with samples, and has no rule"
