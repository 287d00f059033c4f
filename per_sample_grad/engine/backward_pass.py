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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import get_args

import torch
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointError

import xla_replica
from per_sample_grad.engine import comparison
from per_sample_grad.engine.comparison import Comparer, Comparison, Proof
from per_sample_grad.engine.recording import RecordedCall
from per_sample_grad.engine.settings import Accumulate, Settings
from per_sample_grad.engine.walk import Table
from per_sample_grad.errors import CoverageError, PerSampleError, Refusal
from per_sample_grad.factors import forms, plan
from per_sample_grad.factors.factors import JOINED, Factors
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.layers import registry
from per_sample_grad.operations import nodes, wrong_operations
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
        receive: Takes the factors of some parameters at a time.
        retain_graph: Whether to keep the graph.
        accumulate: What of the losses the pass is of, if it adds to ``.grad``.
        reported: Whether what is missing or wrong is for a report and not an error,
            and no fallback replaces a wrong rule.
        together: Whether all factors are handed on together, when the pass is over; so
            they are with a fallback, which may replace those of a rule.
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
    together: bool = False

    def __post_init__(self) -> None:
        if self.accumulate is not None:
            check_choice("accumulate", self.accumulate, get_args(Accumulate))
        self.compared: Comparison | None = None
        self.unused: set[str] = set()
        self._params = self.settings.params
        # One sample's loop is an ordinary backward pass, and needs no permission.
        self._has_loop = self.settings.has_fallback or len(self.losses) == 1
        # What the pass is of, and what its gradients are multiplied by to be those of
        # the losses.
        is_mean, scale = self.accumulate == "mean", self.settings.scale
        total = self.losses.mean() if is_mean else self.losses.sum()
        self._total = total * scale if scale != 1 else total
        self._multiplier = (len(self.losses) if is_mean else 1) / scale
        self._traits = xla_replica.traits(self.losses)
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
        self.together |= self.settings.has_fallback and not self.reported
        self._waiting: list[Factors] = []

    def run(self, table: Table) -> None:
        """Runs the pass; empties its calls, so that each can be freed when applied."""
        self._begin(table)
        if self._calls or self.accumulate is not None:
            self._apply_rules(table.nodes)
        table.nodes.clear()
        if self.problems:
            self._refuse_problems()
            self._use_fallback(self.problems)
        self._hand_on_rest()
        if self._comparer is not None:
            self._conclude(self._comparer, table)
        self._refuse_changes([*self._versions])
        merged: dict[str, Sequence[Contribution]] = {}
        for factors in self._waiting:
            factors.versions.refuse_changes(_EDITED, ", ".join(factors.shapes))
            if self.together:
                merged.update(factors.merged)
            else:  # one by one: the same programs as in a pass without a comparison
                self.receive(factors)
        if self.together:
            self.receive(self.factors_of({name: merged[name] for name in self._params}))

    def _begin(self, table: Table) -> None:
        """Takes the calls, decides on a comparison, and refuses what is known wrong."""
        settings, proof, calls = self.settings, table.proof, table.calls
        self.problems = {name: [why] for name, why in table.problems.items()}
        if self.problems:
            self._refuse_problems()
        if proof is not None:
            self._cancelling |= proof.cancelling
            if settings.has_fallback and not self.reported:
                reason = "its rule is wrong for this structure"
                self.problems |= {name: [reason] for name in proof.wrong}
        elif self._traits.is_lazy:
            found = {node.name() for node in table.nodes}
            wrong_operations.refuse_wrong_operations(found)
        self._comparer = self._new_comparer(table)
        if self._comparer is not None:
            # It reads the device anyway; a lazy one must not be read before.
            self._may_read |= not self._traits.is_lazy
        # Temporaries are in float32.
        recorded = sum([4 * call.shape.numel() for call in calls])
        share = recorded // plan.SHARE_OF_RECORDED
        is_host = self._traits.is_host
        least = plan.SMALLEST_BUDGET_ON_HOST if is_host else plan.SMALLEST_BUDGET
        self._budget = settings.budget or min(plan.LARGEST_BUDGET, max(least, share))
        self.modules = [call.owner for call in calls]
        self._calls: list[RecordedCall | None] = list(calls)
        calls.clear()

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
            versions=forms.Versions((), [u for uses in merged.values() for u in uses]),
        )

    def _refuse_problems(self) -> None:
        """Raises CoverageError for problems without a fallback."""
        if self._has_loop:
            return
        by_reason: dict[str, list[str]] = {}
        for name, reasons in self.problems.items():
            by_reason.setdefault("; ".join(reasons), []).append(name)
        lines = [f"  {', '.join(each)}: {why}\n" for why, each in by_reason.items()]
        raise CoverageError(
            "these parameters have uses that no layer rule accounts for:\n"
            f"{''.join(lines)}Register a rule for the module (register_rule, the "
            "cheapest), leave the parameters out (params=), or pass "
            'fallback="loop" (B backward passes of the batch): '
            "docs/per_sample_grad.md#never-silently-wrong"
        )

    def _new_comparer(self, table: Table) -> Comparer | None:
        """Returns a comparer; None if nothing has to be compared in this capture."""
        check, proof, settings = self.settings.check, table.proof, self.settings
        if check == "never" or not len(self.losses):
            return None
        # Where data decide which samples meet, a proof says nothing about other data.
        # Calls that a fallback replaces may be anywhere.
        apart = (proof.wrong if proof else frozenset()).issuperset(table.astray)
        is_wrong = proof is not None and proof.wrong and not settings.has_fallback
        if check == "always" or not apart or is_wrong:
            proof = None
        params, total_norm = self._params, 0.0
        if proof is not None:
            # A parameter whose gradient was zero, or no more than rounding, is compared
            # again as soon as it is more, which is known after the pass.
            params = {n: p for n, p in params.items() if n in proof.unseen}
            total_norm = proof.total_norm
            if not params:
                return None
        dtypes = {each.dtype for node in table.nodes for each in node._input_metadata}
        scale, all_differ = settings.scale, not apart
        comparer = Comparer(self.losses, params, dtypes, scale, all_differ, total_norm)
        if proof is None:
            # With autograd's gradient known, each factor can be freed at once.
            comparer.compute_reference(retain_graph=True)
        return comparer

    def _apply_rules(self, passed: Sequence[Node]) -> None:
        """Runs one backward pass, which forms no gradient of a parameter by default.

        Calls that have others below are seen when the pass comes by; only those at its
        ends are asked for, and their gradients kept until it is over. A pass that
        accumulates goes on to the parameters, so that it comes by all of them.
        """
        calls = [call for call in self._calls if call is not None]
        self._num_missing.update(name for call in calls for name in call.owner.names)
        edges, late = [c.output for c in calls], [c.is_late for c in calls]
        del calls
        asked: list[int] = []
        if self.accumulate is None:
            lowest = nodes.ends(passed, {edge.node for edge in edges})
            asked = [n for n, edge in enumerate(edges) if edge.node in lowest]
        # A fallback needs the graph once more, and so may a comparison.
        retain_graph = self.retain_graph or self._has_loop or any(late)
        if self._comparer is not None and self._comparer.reference is None:
            retain_graph = True
        kept: list[tuple[int, torch.Tensor, forms.Versions]] = []

        def come_by(number: int, gradients: Sequence[torch.Tensor | None]) -> None:
            gradient = gradients[edges[number].output_nr]
            if late[number] and gradient is not None:
                kept.append((number, gradient, forms.Versions([gradient])))
            else:
                self._apply(number, gradient)

        found: Sequence[torch.Tensor | None] = ()
        with contextlib.ExitStack() as placed:
            for number in sorted({*range(len(edges))}.difference(asked)):
                hook = functools.partial(come_by, number)
                placed.callback(edges[number].node.register_prehook(hook).remove)
            total, wanted = self._total, [edges[number] for number in asked]
            try:
                if self.accumulate is None:
                    options = {"retain_graph": retain_graph, "allow_unused": True}
                    found = xla_replica.grad(total, wanted, **options)
                else:
                    xla_replica.backward(total, retain_graph=retain_graph)
            except CheckpointError as error:
                # This version of torch does not tell that hooks keep what was saved.
                raise PerSampleError(_CHECKPOINTED) from error
        for number, gradient, versions in kept:
            versions.refuse_changes(_EDITED, "an operation")
            self._apply(number, gradient)
        for number, each in zip(asked, found):
            self._apply(number, each)
        del found
        for number, call in enumerate(self._calls):
            if call is not None:  # no gradient has come to it, which counts as zero
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
                uses = self._parts.pop(name, [])
                if len(uses) > 1:
                    uses = forms.merge(uses)
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
                    self._versions[name] = [forms.Versions((), uses)]
                    return True
        return False

    def _refuse_changes(self, names: Collection[str]) -> None:
        """Raises PerSampleError if what waited for others was changed in place."""
        for name in names:
            for versions in self._versions.pop(name, []):
                versions.refuse_changes(_EDITED, name)

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
                self._versions.setdefault(name, []).append(forms.Versions((), uses))

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
        # A comparison reads a lazy device, and nothing may do so before.
        if self.together or (self._comparer is not None and self._traits.is_lazy):
            self._waiting.append(factors)
        else:
            self.receive(factors)

    def _use_fallback(self, names: Collection[str]) -> None:
        """Hands on parameters' gradients as B backward passes give them."""
        params = {n: param for n, param in self._params.items() if n in names}
        how = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        inputs, times = list(params.values()), 1 / self._multiplier
        rows = [xla_replica.grad(x, inputs, **how) for x in self.losses.unbind()]
        found = {}
        for name, column in zip(params, zip(*rows)):
            dense = [each.to_dense() if each.is_sparse else each for each in column]
            use = forms.widened(forms.Dense(torch.stack(dense)))
            found[name] = [forms.multiplied(use, times)]
        self._wide.update(found)
        self._hand_on(found)

    def _hand_on_rest(self) -> None:
        """Hands on small gradients, and those of what the losses do not depend on."""
        rest = [name for name in self._params if name not in self._handed_on]
        self.unused = set(rest) - self._small.keys()
        if rest:
            self._refuse_changes(rest)
            self._hand_on({name: self._small.pop(name, []) for name in rest})

    def _conclude(self, comparer: Comparer, table: Table) -> None:
        """Compares; replaces wrong answers by a fallback's; remembers the proof."""
        has_fallback = self.settings.has_fallback
        if comparer.reference is None:
            assert table.proof is not None
            if comparer.says_nothing_new(table.proof.unseen):
                return
            comparer.compute_reference(self.retain_graph or has_fallback)
        self.compared = comparer.result()
        self._cancelling |= self.compared.cancelling
        if self.reported:
            return
        wrong = self.compared.wrong if has_fallback else {}
        if wrong:
            comparer.compute_reference(retain_graph=True)
            self._use_fallback(wrong)
            self.compared = comparer.result()
        comparison.raise_if_wrong(self.compared)
        if not self.compared.unknown:
            astray, is_structural = frozenset(table.astray), table.is_structural
            new = Proof(self.compared.unseen, astray, is_structural)
            proof = (table.proof or new).after(self.compared, wrong)
            comparison.PROVEN.setdefault(self.settings.model, {})[table.key] = proof
