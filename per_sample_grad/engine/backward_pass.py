"""One backward pass over a recorded forward pass: from gradients to factors, checked.

The gradient of a call's output is there when the pass comes to it, and the call's
arguments still are: its rule is applied at that moment, and the factors of a parameter
are handed on when the rules of all its calls were applied. If nobody keeps them, their
memory is free again before the pass continues, as in ordinary training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import get_args

import torch
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointError

import xla_replica
from per_sample_grad.engine import comparison, fallback, graph
from per_sample_grad.engine.attribution import Attribution
from per_sample_grad.engine.comparison import Comparer, Comparison, Proof
from per_sample_grad.engine.independence import samples_stay_apart
from per_sample_grad.engine.recording import RecordedCall, RecordedModule
from per_sample_grad.engine.settings import Accumulate, Settings
from per_sample_grad.errors import PerSampleError, Refusal
from per_sample_grad.factors import forms
from per_sample_grad.factors.factors import JOINED, Factors
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.factors.plan import default_budget
from per_sample_grad.layers import registry
from per_sample_grad.operations import wrong_operations
from xla_replica.common.arguments import check_choice

_EDITED = (
    "a gradient that {} depends on was changed in place after it had arrived: a "
    "backward function of torch.autograd.Function or a tensor's hook edits what it is "
    "given (grad.mul_(2)), which other users of that gradient see; return a new tensor "
    "(grad * 2)"
)

_CHECKPOINTED = (
    "a checkpoint (use_reentrant=False) uses a parameter, and calls no module that has "
    "parameters: call one in it, with a rule (register_rule), or leave the parameter "
    "out (params=), or do without the checkpoint"
)


@dataclasses.dataclass
class BackwardPass:
    """A backward pass that applies every call's rule when its gradient is there.

    Attributes:
        settings: Those of the capture.
        losses: ``(B,)``.
        receive: Takes the factors of some parameters at a time. Factors from a
            fallback come after those of a rule, and may replace them.
        retain_graph: Whether to keep the graph.
        accumulate: What of the losses the pass is of, if it adds to ``.grad``.
        reported: Whether what is missing or wrong is for a report and not an error,
            and no fallback replaces a wrong rule.
        waits: Whether factors are handed on when the pass is over, and not at once.
        modules: The modules of all calls that the losses depend on.
        problems: Why parameters have no contributions, by name.
        compared: The last comparison with autograd; None: none was due.
        unused: Parameters that the losses do not depend on.
    """

    settings: Settings
    losses: torch.Tensor
    receive: Callable[[Factors], None]
    retain_graph: bool = False
    accumulate: Accumulate | None = None
    reported: bool = False
    waits: bool = False

    def __post_init__(self) -> None:
        if self.accumulate is not None:
            check_choice("accumulate", self.accumulate, get_args(Accumulate))
        self.modules: list[RecordedModule] = []
        self.problems: dict[str, list[str]] = {}
        self.compared: Comparison | None = None
        self.unused: set[str] = set()
        self._params = self.settings.params
        # What the pass's gradients are multiplied by to be those of the losses.
        num_summed = len(self.losses) if self.accumulate == "mean" else 1
        self._multiplier = num_summed / self.settings.scale
        self._traits = xla_replica.traits(self.losses)
        self._comparer: Comparer | None = None
        self._budget = 0
        self._calls: list[RecordedCall | None] = []
        # How many calls of each parameter the pass has not come to.
        self._num_missing: Counter[str] = Counter()
        # Contributions that wait for those of other calls, by the parameter's name.
        self._parts: dict[str, list[Contribution]] = {}
        self._versions: dict[str, list[forms.Versions]] = {}
        self._handed_on: set[str] = set()
        # Small gradients wait for others, to be answered together; how many numbers.
        self._small: dict[str, list[Contribution]] = {}
        self._num_small = 0
        # Parameters that a gradient of more bits than bfloat16 adds to.
        self._wide: set[str] = set()
        # Parameters whose positions cancel, as far as that is known.
        self._cancelling: set[str] = set()
        self._may_read = self._traits.is_host
        self._waiting: list[Factors] = []

    def run(self, attribution: Attribution) -> None:
        """Runs the pass; empties its calls, so that each can be freed when applied."""
        settings, calls = self.settings, attribution.calls
        proof = comparison.PROVEN.get(settings.model, {}).get(attribution.key)
        apart = self._keeps_samples_apart(attribution, proof)
        self.problems = {n: [why] for n, why in attribution.uncovered.items()}
        if settings.check == "never" and proof is None:
            self._leave_out_operations(calls)
        self._refuse_problems(attribution.called)
        if proof is not None and settings.has_fallback and not self.reported:
            reason = "its rule is wrong for this structure"
            self.problems |= {name: [reason] for name in proof.wrong}
        nodes = graph.backward_nodes(self.losses.grad_fn)
        if self._traits.is_lazy and proof is None:
            wrong_operations.refuse_wrong_operations({node.name() for node in nodes})
        self._comparer = self._new_comparer(proof, apart, nodes)
        if proof is not None:
            self._cancelling |= proof.cancelling
        if self._comparer is not None:
            # A comparison reads the device anyway; a lazy one must not be read before.
            self.waits |= self._traits.is_lazy
            self._may_read |= not self._traits.is_lazy
        # Temporaries are in float32.
        size = 4 * sum([call.shape.numel() for call in calls])
        self._budget = settings.budget or default_budget(size, self.losses.device)
        self.modules = [call.owner for call in calls]
        self._calls = list(calls)
        calls.clear()
        if self._calls or self.accumulate is not None:
            self._apply_rules(nodes)
        del nodes
        self._refuse_problems(attribution.called)
        if self.problems:
            self._use_fallback(self.problems)
        rest = [name for name in self._params if name not in self._handed_on]
        self.unused = set(rest) - self._small.keys()
        if rest:
            self._refuse_changes(rest)
            self._hand_on({name: self._small.pop(name, []) for name in rest})
        if self._comparer is not None:
            self._conclude(self._comparer, attribution.key, apart)
        self._refuse_changes([*self._versions])
        for factors in self._waiting:
            self.receive(factors)

    def run_without_samples(self) -> None:
        """Gives answers of shape ``(0, ...)``; adds to ``.grad`` what autograd adds."""
        if self.accumulate is not None:
            xla_replica.backward(self._total(), retain_graph=self.retain_graph)
        self.receive(self.factors_of({name: [] for name in self._params}))

    def factors_of(self, merged: Mapping[str, Sequence[Contribution]]) -> Factors:
        """Returns parameters' factors from their contributions, by name."""
        return Factors(
            {name: tuple(self._params[name].shape) for name in merged},
            merged,
            self.losses.detach(),
            multiplier=self._multiplier,
            method=self.settings.method,
            budget=self._budget,
            cancelling=self._cancelling,
            may_read=self._may_read,
            of_bfloat16=self._wide.isdisjoint(merged),
        )

    def _keeps_samples_apart(
        self, attribution: Attribution, proof: Proof | None
    ) -> bool:
        """Returns whether what is proven of this structure holds for other data."""
        if proof is not None and not proof.wrong:
            return proof.keeps_samples_apart
        # Calls that a fallback replaces may be anywhere.
        wrong = frozenset() if proof is None else proof.wrong
        calls = [c for c in attribution.calls if not wrong.issuperset(c.owner.names)]
        return samples_stay_apart(self.losses, calls, attribution.may_read)

    def _refuse_problems(self, called: bool) -> None:
        """Raises CoverageError if there are problems, and no fallback for them."""
        if self.problems and not self.settings.has_fallback:
            fallback.raise_uncovered(self.problems, self.losses, called)

    def _leave_out_operations(self, calls: list[RecordedCall]) -> None:
        """Takes out operations, whose parameters become problems.

        That shapes say where samples are in an operation is only believed when it is
        compared.
        """
        for call in calls:
            for name in call.owner.names if call.owner.is_operation else ():
                reason = f'{call.owner} is only believed without check="never"'
                self.problems.setdefault(name, []).append(reason)
        calls[:] = [call for call in calls if not call.owner.is_operation]

    def _total(self) -> torch.Tensor:
        """Returns what the pass is of."""
        mean = self.accumulate == "mean"
        total = self.losses.mean() if mean else self.losses.sum()
        scale = self.settings.scale
        return total * scale if scale != 1 else total

    def _new_comparer(
        self, proof: Proof | None, apart: bool, nodes: Collection[Node]
    ) -> Comparer | None:
        """Returns a comparer; None if nothing has to be compared in this capture."""
        check = self.settings.check
        if check == "never":
            return None
        # Where data decide which samples meet, a proof says nothing about other data.
        if check == "always" or not apart:
            proof = None
        known = proof is not None and (not proof.wrong or self.settings.has_fallback)
        # A parameter whose gradient was zero, or no more than rounding, is compared
        # again as soon as it is more, which is known after the pass.
        params, total_norm = self._params, 0.0
        if proof is not None and known:
            params = {n: p for n, p in params.items() if n in proof.unseen}
            total_norm = proof.total_norm
        if not params:
            return None
        dtypes, scale = graph.gradient_dtypes(nodes), self.settings.scale
        comparer = Comparer(self.losses, params, dtypes, scale, not apart, total_norm)
        if not known:
            # With autograd's gradient known, each factor can be freed at once.
            comparer.compute_reference(retain_graph=True)
        return comparer

    def _apply_rules(self, nodes: Sequence[Node]) -> None:
        """Runs one backward pass, which forms no gradient of a parameter by default.

        Calls that have others below are seen when the pass comes by; only those at its
        ends are asked for, and their gradients kept until it is over. A pass that
        accumulates goes on to the parameters, so that it comes by all of them.
        """
        calls = [call for call in self._calls if call is not None]
        self._num_missing.update(name for call in calls for name in call.owner.names)
        # A fallback needs the graph once more, and so may a comparison.
        comparer = self._comparer
        retain_graph = self.retain_graph or self.settings.has_fallback
        retain_graph |= comparer is not None and not comparer.has_reference
        # Some rules run the node itself, which they can when the pass is over.
        late: dict[int, list[tuple[torch.Tensor, forms.Versions]]] = {
            number: [] for number, call in enumerate(calls) if call.call.runs_nodes
        }
        retain_graph |= bool(late)
        edges = [call.region.output for call in calls]
        reached = {edge.node for edge in edges}.intersection(nodes)
        asked: set[Node] = set()
        if self.accumulate is None:
            asked = graph.ends(nodes, reached)

        def come_by(number: int, gradients: Sequence[torch.Tensor | None]) -> None:
            gradient = gradients[edges[number].output_nr]
            if number in late and gradient is not None:
                versions = forms.Versions([forms.Dense(gradient)])
                late[number].append((gradient, versions))
            else:
                self._apply(number, gradient)

        del calls
        numbers = [n for n, edge in enumerate(edges) if edge.node in asked]
        found: Sequence[torch.Tensor | None] = ()
        with contextlib.ExitStack() as placed:
            for number, edge in enumerate(edges):
                if edge.node in reached and edge.node not in asked:
                    hook = functools.partial(come_by, number)
                    placed.callback(edge.node.register_prehook(hook).remove)
            total = self._total()
            try:
                if self.accumulate is None:
                    found = xla_replica.grad(
                        total,
                        [edges[number] for number in numbers],
                        retain_graph=retain_graph,
                        allow_unused=True,
                    )
                else:
                    xla_replica.backward(total, retain_graph=retain_graph)
            except CheckpointError as error:
                # This version of torch does not tell that hooks keep what was saved.
                raise PerSampleError(_CHECKPOINTED) from error
        for number, kept in late.items():
            for gradient, versions in kept:
                versions.refuse_changes(_EDITED.format(self._calls[number].owner))
                self._apply(number, gradient)
        for number, gradient in zip(numbers, found):
            self._apply(number, gradient)
        del found
        for number, call in enumerate(self._calls):
            if call is None:
                continue
            if edges[number].node in reached:
                raise PerSampleError(
                    f"the backward pass never came to {call.owner}: this is a defect "
                    "of per_sample_grad; please report it"
                )
            # A module may take no gradient of an input: then calls below have none.
            self._apply(number, None)

    def _apply(self, number: int, gradient: torch.Tensor | None) -> None:
        """Applies a call's rule, and hands on the parameters that are complete."""
        call = self._calls[number]
        assert call is not None
        names = call.owner.names
        with forms.full_precision(self.losses.device, products=False):
            if gradient is not None:
                gradient = gradient.detach().reshape(call.shape)
                if self._comparer is not None:
                    self._comparer.add_gradient(call, gradient, self._multiplier)
                self._add_contributions(call, gradient)
            self._calls[number] = call = None  # its arguments can be freed
            complete = {}
            for name in names:
                self._num_missing[name] -= 1
                if self._num_missing[name] or name in self.problems:
                    continue
                self._refuse_changes([name])
                uses = forms.merge(self._parts.pop(name, []))
                if not self._keeps_small(name, uses):
                    complete[name] = uses
            if complete:
                self._hand_on(complete)

    def _keeps_small(self, name: str, uses: list[Contribution]) -> bool:
        """Keeps gradients that are small until the pass ends, up to a MiB or two."""
        match uses:
            case [forms.Dense(values)] if values.dtype == torch.float32:
                number = self._num_small + values.numel()
                if values.numel() <= JOINED and number <= 8 * JOINED:
                    self._num_small, self._small[name] = number, uses
                    self._versions[name] = [forms.Versions(uses)]
                    return True
        return False

    def _refuse_changes(self, names: Collection[str]) -> None:
        """Raises PerSampleError if what waited for others was changed in place."""
        for name in names:
            for versions in self._versions.pop(name, []):
                versions.refuse_changes(_EDITED.format(name))

    def _add_contributions(self, call: RecordedCall, gradient: torch.Tensor) -> None:
        """Adds what a call's rule returns to the contributions of its parameters."""
        params = call.owner.params
        wanted = {i: name for i, name in params.items() if name not in self.problems}
        if not wanted:
            return
        count, owner = len(self.losses), call.owner
        shapes = {inner: tuple(self._params[wanted[inner]].shape) for inner in wanted}
        assert owner.rule is not None
        try:
            rows = self._with_rows(call, gradient)
            found = registry.apply(owner.rule, owner, call.call, rows, shapes, count)
        except Refusal as refusal:
            for name in call.owner.names:
                self.problems.setdefault(name, []).append(f"{call.owner}: {refusal}")
                self._parts.pop(name, None)
                self._versions.pop(name, None)
            return
        if gradient.dtype != torch.bfloat16:
            self._wide.update(wanted.values())
        for inner, uses in found.items():
            name = wanted[inner]
            uses = [forms.widened(use) for use in uses]
            if len(rows) != count:
                uses = [forms.regroup(use, count) for use in uses]
            self._parts.setdefault(name, []).extend(uses)
            if self._num_missing[name] > 1:  # they wait for those of other calls
                self._versions.setdefault(name, []).append(forms.Versions(uses))

    def _with_rows(self, call: RecordedCall, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a gradient batch first; raises Refusal if rows are not samples'."""
        gradient, num_samples = call.call.batch_first(gradient), len(self.losses)
        rows = gradient.shape[0]
        if rows == 0 or rows % num_samples:
            raise Refusal(call.why_no_rows(num_samples))
        if rows != num_samples and self.settings.check == "never":
            raise Refusal(
                f"it was called with {rows} rows for {num_samples} samples; that "
                "each owns consecutive ones is only believed when checked: do not pass "
                'check="never"'
            )
        return gradient

    def _hand_on(self, merged: Mapping[str, Sequence[Contribution]]) -> None:
        """Gives parameters' factors to who asked for them, and to the comparison."""
        factors = self.factors_of(merged)
        if self._comparer is not None:
            self._comparer.add(factors)
        self._handed_on.update(merged)
        if not self.waits:
            self.receive(factors)
            return
        self._waiting.append(factors)
        self._versions |= {n: [forms.Versions(uses)] for n, uses in merged.items()}

    def _use_fallback(self, names: Collection[str]) -> None:
        """Hands on parameters' gradients as B backward passes give them."""
        params = {n: param for n, param in self._params.items() if n in names}
        found = fallback.loop(self.losses, params)
        self._wide.update(found)
        times = 1 / self._multiplier
        self._hand_on(
            {
                name: [forms.multiplied(forms.widened(forms.Dense(rows)), times)]
                for name, rows in found.items()
            }
        )

    def _conclude(self, comparer: Comparer, key: Hashable, apart: bool) -> None:
        """Compares; replaces wrong answers by a fallback's; remembers the proof."""
        if not comparer.has_reference:
            proof = comparison.PROVEN[self.settings.model][key]
            if comparer.says_nothing_new(proof.unseen):
                return
            comparer.compute_reference(self.retain_graph or self.settings.has_fallback)
        self.compared = comparer.result()
        self._cancelling |= self.compared.cancelling
        if self.reported:
            return
        wrong = self.compared.wrong if self.settings.has_fallback else {}
        if wrong:
            comparer.compute_reference(retain_graph=True)
            self._use_fallback(wrong)
            self.compared = comparer.result()
        comparison.raise_if_wrong(self.compared)
        comparison.remember(self.settings.model, key, self.compared, wrong, apart)
