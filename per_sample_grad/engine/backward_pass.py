"""One backward pass over a recorded forward pass: from gradients to factors, checked.

The gradient of a call's output is there when the pass reaches it, and the call's
arguments still are: its rule is applied at that moment, and a parameter whose calls
have all been reached is handed on. If nobody keeps it, its memory is free again before
the pass continues, as in ordinary training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

import xla_replica
from per_sample_grad.engine import comparison, graph, recording
from per_sample_grad.engine.accounting import Accounted
from per_sample_grad.engine.comparison import Check, Comparer
from per_sample_grad.engine.fallback import FALLBACKS, Fallback, raise_uncovered
from per_sample_grad.engine.independence import samples_stay_apart
from per_sample_grad.engine.placement import RecordedModule
from per_sample_grad.engine.recording import EnclosingCall, RecordedCall
from per_sample_grad.errors import PerSampleError, Refusal
from per_sample_grad.factors import forms
from per_sample_grad.factors.factors import JOINED, Factors
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.factors.plan import Method, default_budget
from per_sample_grad.operations import wrong_operations

# The reductions whose gradient a pass may add to ``.grad``.
Accumulate = Literal["mean", "sum"]


class Settings(NamedTuple):
    """What a capture was told, see `Capture`; ``params`` are the selected ones."""

    model: nn.Module
    params: Mapping[str, nn.Parameter]
    fallback: Fallback
    check: Check
    method: Method
    budget: int | None
    scale: float


class BackwardPass:
    """A backward pass that applies every call's rule when its gradient is there.

    Args:
        settings: Those of the capture.
        losses: ``(B,)``.
        receive: Takes the factors of some parameters at a time. Factors from a
            fallback come after those of a rule, and may replace them.
        retain_graph: Keep the graph.
        accumulate: What of the losses the pass is of, if it adds to ``.grad``.
        reported: What is missing or wrong is for a report and not an error, and no
            fallback replaces a wrong rule; without a fallback nothing is compared.
        frees: Memory that the pass has used is free afterwards, so that temporaries
            may take half of it.
        called: Whether any module with a selected parameter was called.

    Attributes:
        modules: The modules of all calls that the losses depend on.
        problems: Why parameters have no contributions, by name.
        compared: The comparison with autograd; None: none was due.
        unused: Parameters that the losses do not depend on.
        has_other_leaves: Whether the losses depend on anything that takes a gradient
            but is not a selected parameter, outside of calls.
        multiplier: What the pass's gradients are multiplied by to be those of the
            losses.
    """

    def __init__(
        self,
        settings: Settings,
        losses: torch.Tensor,
        receive: Callable[[Factors], None],
        *,
        retain_graph: bool = False,
        accumulate: Accumulate | None = None,
        reported: bool = False,
        frees: bool = False,
        called: bool = True,
    ) -> None:
        self.modules: list[RecordedModule] = []
        self.problems: dict[str, list[str]] = {}
        self.compared: comparison.Comparison | None = None
        self.unused: set[str] = set()
        self.has_other_leaves = False
        num_summed = losses.shape[0] if accumulate == "mean" else 1
        self.multiplier = num_summed / settings.scale
        self._settings, self._params = settings, settings.params
        self._losses, self._receive = losses, receive
        self._retain_graph, self._accumulate = retain_graph, accumulate
        self._reported, self._frees, self._called = reported, frees, called
        self._fallback = FALLBACKS[settings.fallback]
        self._comparer: Comparer | None = None
        self._budget = 0
        self._calls: list[RecordedCall | None] = []
        # How many numbers were in the outputs of the calls that were reached.
        self._passed = 0
        # How many calls of each parameter are yet to be reached.
        self._missing: dict[str, int] = {}
        self._parts: dict[str, list[Contribution]] = {}
        # Of contributions that wait for others, by the parameter's name.
        self._versions: dict[str, list[forms.Versions]] = {}
        self._handed_on: set[str] = set()
        # Small gradients wait for others, which takes fewer calls; how many numbers.
        self._small: dict[str, list[Contribution]] = {}
        self._num_small = 0
        # Parameters whose positions cancel, as far as that is known.
        self._cancelling: set[str] = set()
        self._may_read = xla_replica.traits(losses).is_host
        # Whether what is proven of this structure holds for other data, too.
        self._holds = False
        # What is given on after the comparison; None: at once.
        self._waiting: list[Factors] | None = None

    def run(self, accounted: Accounted) -> None:
        """Runs the pass; empties its calls, so that each can be freed once reached."""
        settings, has_fallback = self._settings, self._fallback is not None
        model, calls = settings.model, accounted.calls
        self.has_other_leaves = accounted.has_other_leaves
        outside = {
            name: [
                f"{number} use(s) outside any module with a rule ("
                f"{recording.why_outside(model, self._params[name])}; {reason})"
            ]
            for name, (number, reason) in accounted.uncovered.items()
        }
        proof = comparison.PROVEN.get(model, {}).get(accounted.key)
        wrong = proof.wrong if proof is not None else frozenset()
        if proof is not None and not wrong:
            self._holds = proof.holds
        else:  # Calls that a fallback replaces may be anywhere.
            rest = [call for call in calls if not wrong.issuperset(call.owner.names)]
            self._holds = samples_stay_apart(self._losses, rest, accounted.may_read)
        if settings.check == "never" and proof is None:
            # That shapes say where samples are is only believed when compared.
            unproven = [call for call in calls if call.owner.is_operation]
            calls[:] = [call for call in calls if not call.owner.is_operation]
            for call in unproven:
                for name in call.owner.names:
                    reason = f'{call.owner} is only believed without check="never"'
                    outside.setdefault(name, []).append(reason)
        if outside and not has_fallback and not self._reported:
            raise_uncovered(outside, self._losses, self._called)
        is_lazy = xla_replica.traits(self._losses).is_lazy
        if is_lazy and proof is None:
            names = graph.inventory(self._losses).names
            wrong_operations.refuse_wrong_operations(names)
        # Without a fallback a report says what is missing, and not what is wrong.
        lenient = self._reported and not has_fallback
        if not lenient:
            self._comparer = self._start_comparing(proof)
        if proof is not None:
            self._cancelling |= proof.cancelling
        if self._comparer is not None:
            # A comparison reads the device anyway; a lazy one must not be read before.
            if is_lazy:
                self._waiting = []
            else:
                self._may_read = True
        if proof is not None and has_fallback and not self._reported:
            reason = "its rule is wrong for this structure"
            self.problems = {name: [reason] for name in wrong}
        self.problems |= outside
        # Temporaries are in float32.
        size = 4 * sum([call.shape.numel() for call in calls])
        self._budget = settings.budget or default_budget(size, self._losses.device)
        self.modules = [call.owner for call in calls]
        self._calls = list(calls)
        calls.clear()
        # A fallback needs the graph once more, and so may a comparison.
        comparer = self._comparer
        again = has_fallback or (comparer is not None and not comparer.knows_truth)
        again |= any(call.call.runs_nodes for call in self._calls)
        self._frees = self._frees and not again
        if self._calls:
            self._reach_all(self._retain_graph or again)
        if self.problems and not lenient:
            if not has_fallback:
                raise_uncovered(self.problems, self._losses, self._called)
            found = self._by_fallback(self.problems.keys() - wrong, accounted.enclosing)
            found |= self._by_fallback(self.problems.keys() & wrong, [])
            self._hand_on(found)
        rest = self._params.keys() - self._handed_on - self.problems.keys()
        if rest:
            ordered = [name for name in self._params if name in rest]
            self.unused = rest - self._small.keys()
            for name in ordered:
                self._refuse_changes(name)
            self._hand_on({name: self._small.pop(name, []) for name in ordered})
        self._conclude(accounted.key)
        for factors in self._waiting or []:
            factors.refuse_changes()
            self._receive(factors)

    def run_without_samples(self) -> None:
        """Gives answers of shape ``(0, ...)``; adds to ``.grad`` what autograd adds."""
        if self._accumulate is not None:
            xla_replica.backward(self._total(), retain_graph=self._retain_graph)
        self._receive(self.factors_of({name: [] for name in self._params}))

    def _total(self) -> torch.Tensor:
        """Returns what the pass is of."""
        mean = self._accumulate == "mean"
        total = self._losses.mean() if mean else self._losses.sum()
        scale = self._settings.scale
        return total * scale if scale != 1 else total

    def _start_comparing(self, proof: comparison.Proof | None) -> Comparer | None:
        """Returns a comparer; None if nothing has to be compared in this capture."""
        check, scale = self._settings.check, self._settings.scale
        if check == "never":
            return None
        # Where data decide which samples meet, a proof says nothing about other data.
        if check == "always" or not self._holds:
            proof = None
        known = proof is not None and (not proof.wrong or self._fallback is not None)
        # A parameter whose gradient was zero is compared again as soon as it has a
        # gradient, which is known after the pass.
        params, whole = self._params, 0.0
        if known:
            params = {n: p for n, p in params.items() if n in proof.silent}
            whole = proof.whole
        if not params:
            return None
        dtypes = graph.inventory(self._losses).dtypes
        comparer = Comparer(
            self._losses, params, whole, scale, dtypes, differ=not self._holds
        )
        if not known:
            # With autograd's gradient known, each factor can be freed at once.
            comparer.expect(retain_graph=True)
        return comparer

    def _reach_all(self, retain_graph: bool) -> None:
        """Runs one backward pass, which forms no gradient of a parameter by default.

        Calls that have others below are seen when the pass comes by; only the lowest
        are asked for, and their gradients kept until the pass ends. A pass that
        accumulates goes on to the parameters, so that it comes by all of them.
        """
        edges = [call.region.output for call in self._calls if call is not None]
        nodes = [edge.node for edge in edges]
        # Some calls wait for the end of the pass, since their rules run the node.
        late: dict[int, list[tuple[torch.Tensor, forms.Versions]]] = {}
        for number, call in enumerate(self._calls):
            assert call is not None
            for name in call.owner.names:
                self._missing[name] = self._missing.get(name, 0) + 1
            if call.call.runs_nodes:
                late[number] = []
        ends, passed = self._ends(nodes)
        del call

        def look(number: int, output: int, gradients: Sequence[torch.Tensor]) -> None:
            gradient = gradients[output]
            if number in late and gradient is not None:
                versions = forms.Versions([forms.Dense(gradient)])
                late[number].append((gradient, versions))
            else:
                self._reach(number, gradient)

        handles = []
        try:
            for number in passed:
                hook = functools.partial(look, number, edges[number].output_nr)
                handles.append(nodes[number].register_prehook(hook))
            del nodes
            gradients: Sequence[torch.Tensor | None] = ()
            if self._accumulate is None:
                asked = [edges[number] for number in ends]
                gradients = xla_replica.grad(
                    self._total(), asked, retain_graph=retain_graph, allow_unused=True
                )
            else:
                xla_replica.backward(self._total(), retain_graph=retain_graph)
        finally:
            for handle in handles:
                handle.remove()
        for number, kept in late.items():
            for gradient, versions in kept:
                versions.refuse_changes(str(self._calls[number].owner))
                self._reach(number, gradient)
        for number, gradient in zip(ends, gradients):
            self._reach(number, gradient)
        del gradients
        if any(self._calls):
            self._reach_rest(edges)

    def _ends(self, nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Returns the calls to ask for gradients of, and those that the pass comes by.

        What is in neither has no gradient.
        """
        numbers = range(len(nodes))
        if self._accumulate is not None:
            return [], list(numbers)
        found, passed = graph.lowest(self._losses.grad_fn, nodes)
        ends = [number for number in numbers if nodes[number] in found]
        return ends, [number for number in numbers if nodes[number] in passed]

    def _reach_rest(self, edges: Sequence[GradientEdge]) -> None:
        """Reaches calls to which no gradient came, as no module hands one on to them.

        A module may take no gradient of an input.
        """
        nodes = [edge.node for edge in edges]
        passed = graph.reachable(self._losses.grad_fn, nodes)
        for number, node in enumerate(nodes):
            if self._calls[number] is not None and node not in passed:
                self._reach(number, None)
        unseen = [str(call.owner) for call in self._calls if call is not None]
        if unseen:
            raise PerSampleError(
                f"the backward pass never came to {', '.join(unseen)}, on which the "
                "losses depend: this is a defect of per_sample_grad; please report it"
            )

    def _reach(self, number: int, gradient: torch.Tensor | None) -> None:
        """Applies a call's rule, and hands on the parameters that are complete."""
        with forms.full_precision(self._losses.device):
            call = self._calls[number]
            assert call is not None
            names = call.owner.names
            if gradient is not None:
                if gradient.requires_grad or gradient.shape != call.shape:
                    gradient = gradient.detach().reshape(call.shape)
                self._apply(call, gradient)
            size = call.shape.numel()
            self._calls[number] = call = None  # its arguments can be freed
            complete = {}
            for name in names:
                self._missing[name] -= 1
                if self._missing[name] or name in self.problems:
                    continue
                self._refuse_changes(name)
                uses = forms.merge(self._parts.pop(name, []))
                if not self._keeps_small(name, uses):
                    complete[name] = uses
            if complete:
                self._hand_on(complete)
            self._passed += size

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

    def _refuse_changes(self, name: str) -> None:
        """Raises PerSampleError if what waited for other uses was changed in place."""
        for each in self._versions.pop(name, []):
            each.refuse_changes(name)

    def _apply(self, call: RecordedCall, gradient: torch.Tensor) -> None:
        params = call.owner.params
        if self._comparer is not None:
            self._comparer.witness(
                call.call, params.values(), gradient, self.multiplier
            )
        wanted = {i: name for i, name in params.items() if name not in self.problems}
        if not wanted:
            return
        try:
            found = self._contributions(call, gradient)
            missing = sorted(set(wanted) - set(found))
            if missing:
                raise Refusal(f"its rule returned nothing for {', '.join(missing)}")
            parts = {inner: self._uses_in(found[inner]) for inner in wanted}
        except Refusal as refusal:
            for name in dict.fromkeys(params.values()):
                self.problems.setdefault(name, []).append(f"{call.owner}: {refusal}")
                self._parts.pop(name, None)
            return
        for inner, uses in parts.items():
            self._parts.setdefault(wanted[inner], []).extend(uses)
            self._versions.setdefault(wanted[inner], []).append(forms.Versions(uses))

    def _uses_in(
        self, found: Contribution | Sequence[Contribution]
    ) -> list[Contribution]:
        uses = found if isinstance(found, Sequence) else [found]
        return [forms.regroup(forms.widened(use), len(self._losses)) for use in uses]

    def _contributions(
        self, call: RecordedCall, gradient: torch.Tensor
    ) -> Mapping[str, Contribution | Sequence[Contribution]]:
        """Applies the rule to a gradient whose rows belong to the samples."""
        gradient, num_samples = call.call.batch_first(gradient), len(self._losses)
        rows = gradient.shape[0]
        if rows == 0 or rows % num_samples:
            raise Refusal(recording.why_no_samples(call, num_samples))
        if rows != num_samples and self._settings.check == "never":
            raise Refusal(
                f"it was called with {rows} rows for {num_samples} samples; that "
                "each owns consecutive ones is only believed when checked: do not pass "
                'check="never"'
            )
        return call.owner.rule(call.call, gradient)

    def _hand_on(self, merged: Mapping[str, Sequence[Contribution]]) -> None:
        # Half of four bytes for each number that is not needed any more.
        more = 2 * self._passed if self._frees and self._settings.budget is None else 0
        factors = self.factors_of(merged, more)
        if self._comparer is not None:
            self._comparer.add(factors)
        self._handed_on.update(merged)
        if self._waiting is None:
            self._receive(factors)
        else:
            self._waiting.append(factors)

    def factors_of(
        self, merged: Mapping[str, Sequence[Contribution]], more: int = 0
    ) -> Factors:
        """Returns the parameters' factors; temporaries may take ``more`` bytes."""
        return Factors(
            {name: tuple(self._params[name].shape) for name in merged},
            merged,
            self._losses.detach(),
            multiplier=self.multiplier,
            method=self._settings.method,
            budget=self._budget + more,
            cancelling=self._cancelling,
            may_read=self._may_read,
        )

    def _by_fallback(
        self, names: Collection[str], calls: Sequence[EnclosingCall]
    ) -> dict[str, list[Contribution]]:
        assert self._fallback is not None
        params = {n: self._params[n] for n in self._params if n in names}
        if not params:
            return {}
        found = self._fallback.gradients(self._losses, params, calls)
        return {
            name: [forms.multiplied(forms.widened(forms.Dense(g)), 1 / self.multiplier)]
            for name, g in found.items()
        }

    def _conclude(self, key: Hashable) -> None:
        """Compares; replaces wrong answers by a fallback's; remembers the proof."""
        comparer = self._comparer
        if comparer is None:
            return
        if not comparer.knows_truth:
            if comparer.nothing_arrived():
                return
            comparer.expect(self._retain_graph or self._fallback is not None)
        self.compared = comparer.result()
        self._cancelling |= self.compared.cancelling
        if self._reported:
            return
        wrong = self.compared.wrong if self._fallback is not None else {}
        if wrong:
            comparer.expect(retain_graph=True)
            self._hand_on(self._by_fallback(wrong, []))
            self.compared = comparer.result()
        comparison.judge(self.compared)
        comparison.remember(
            self._settings.model, key, self.compared, wrong, self._holds
        )
