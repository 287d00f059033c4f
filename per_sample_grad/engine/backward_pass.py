"""One backward pass over a recorded forward pass: from gradients to factors, checked.

The gradient of a call's output is there when the pass reaches it, and the call's
arguments still are: its rule is applied at that moment, and a parameter whose calls
have all been reached is handed on. If nobody keeps it, its memory is free again before
the pass continues, as in ordinary training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch

import xla_replica
from per_sample_grad.engine import comparison, graph, recording
from per_sample_grad.engine.comparison import Comparer
from per_sample_grad.engine.fallback import FALLBACKS
from per_sample_grad.engine.recording import (
    EnclosingCall,
    RecordedCall,
    RecordedModule,
)
from per_sample_grad.errors import CoverageError, PerSampleError, Refusal
from per_sample_grad.factors import forms
from per_sample_grad.factors.factors import JOINED, Factors
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.factors.plan import default_budget
from per_sample_grad.operations import wrong_operations

# The reductions whose gradient a pass may add to ``.grad``.
Accumulate = Literal["mean", "sum"]

# The bytes of inputs and gradients that wait on a CPU until they are taken together:
# half of a cache. What Python does between a pass's large operations takes ten times as
# long as elsewhere, since these have filled the caches.
WAITING = 2**23

if TYPE_CHECKING:
    from per_sample_grad.engine.capturing import Capture


class Taker(Protocol):
    """Takes calls with the gradients of their outputs, in place of rules."""

    def prepare(self, call: RecordedCall) -> bool:
        """Returns whether a call can wait until the graph has freed what it saved.

        It is asked before the pass.
        """

    def take(self, call: RecordedCall, gradient: torch.Tensor) -> bool:
        """Takes a call with the gradient of its output; returns whether it did."""


@dataclasses.dataclass(eq=False)
class BackwardPass:
    """A backward pass that applies every call's rule when its gradient is there.

    Attributes:
        receive: Takes the factors of some parameters at a time. Factors from a
            fallback come after those of a rule, and may replace them.
        reported: What is missing or wrong is for a report and not an error, and no
            fallback replaces a wrong rule; without a fallback nothing is compared.
        accumulate: What of the losses the pass is of, if it adds to ``.grad``.
        frees: Memory that the pass has used is free afterwards, so that temporaries
            may take half of it.
        called: Whether any module with a selected parameter was called.
        enclosing: Calls that a fallback may run again.
        reasons: Why operations do not account for what rules do not, by name.
        taker: Takes calls and the gradients of their outputs in place of rules. It is
            not asked where answers are compared.
        modules: The modules of all calls that the losses depend on.
        problems: Why parameters have no contributions, by name.
        compared: The comparison with autograd; None: none was due.
    """

    capture: Capture
    losses: torch.Tensor
    receive: Callable[[Factors], None]
    retain_graph: bool
    accumulate: Accumulate | None
    reported: bool
    frees: bool
    called: bool
    enclosing: Sequence[EnclosingCall]
    reasons: Mapping[str, str]
    taker: Taker | None = None

    def __post_init__(self) -> None:
        self.modules: list[RecordedModule] = []
        self.problems: dict[str, list[str]] = {}
        self.compared: comparison.Comparison | None = None
        self._params = self.capture.params
        # What the pass's gradients are multiplied by to be those of the losses.
        num_summed = len(self.losses) if self.accumulate == "mean" else 1
        self._multiplier = num_summed / self.capture.scale
        self._fallback = FALLBACKS[self.capture.fallback]
        self._comparer: Comparer | None = None
        self._budget = 0
        self._calls: list[RecordedCall | None] = []
        # How many numbers were in the outputs of the calls that were reached.
        self._passed = 0
        # How many calls of each parameter are yet to be reached.
        self._missing: Counter[str] = Counter()
        self._parts: dict[str, list[Contribution]] = {}
        self._handed_on: set[str] = set()
        # Small gradients wait for others, which takes fewer calls; how many numbers.
        self._small: dict[str, list[Contribution]] = {}
        self._num_small = 0
        # Parameters whose positions cancel, as far as that is known.
        self._cancelling: set[str] = set()
        self._may_read = xla_replica.traits(self.losses).is_host
        self._taker: Taker | None = None
        # What is given on after the comparison; None: at once.
        self._waiting: list[Factors] | None = None

    @property
    def multiplier(self) -> float:
        """What the pass's gradients are multiplied by to be those of the losses."""
        return self._multiplier

    def run(
        self, calls: list[RecordedCall], reached: graph.Reached, key: Hashable
    ) -> None:
        """Runs the pass; empties ``calls``, so that each can be freed once reached.

        A proof of what is computed is kept under ``key``.
        """
        model, has_fallback = self.capture.model, self._fallback is not None
        outside = {
            name: [
                f"{number} use(s) outside any module with a rule ("
                f"{recording.why_outside(model, self._params[name])}; "
                f"{self.reasons[name]})"
            ]
            for name, number in reached.outside.items()
        }
        proof = comparison.PROVEN.get(model, {}).get(key)
        if self.capture.check == "never" and proof is None:
            # That shapes say where samples are is only believed when compared.
            unproven = [call for call in calls if call.owner.is_operation]
            calls[:] = [call for call in calls if not call.owner.is_operation]
            for call in unproven:
                for name in call.owner.params.values():
                    reason = f'{call.owner} is only believed without check="never"'
                    outside.setdefault(name, []).append(reason)
        if outside and not has_fallback and not self.reported:
            self._raise_uncovered(outside)
        is_lazy = xla_replica.traits(self.losses).is_lazy
        if is_lazy and proof is None:
            names = graph.inventory(self.losses).names
            wrong_operations.refuse_wrong_operations(names)
        # Without a fallback a report says what is missing, and not what is wrong.
        lenient = self.reported and not has_fallback
        if not lenient:
            self._comparer = self._start_comparing(proof, reached.reordered)
        if proof is not None:
            self._cancelling |= proof.cancelling
        if self._comparer is not None:
            # A comparison reads the device anyway; a lazy one must not be read before.
            if is_lazy:
                self._waiting = []
            else:
                self._may_read = True
        if proof is not None and has_fallback and not self.reported:
            wrong = "its rule is wrong for this structure"
            self.problems = {name: [wrong] for name in proof.wrong}
        self.problems |= outside
        # Temporaries are in float32.
        size = sum(call.shape.numel() * 4 for call in calls)
        self._budget = self.capture.budget or default_budget(size, self.losses.device)
        self.modules = [call.owner for call in calls]
        self._calls = list(calls)
        calls.clear()
        # A fallback needs the graph once more, and so may a comparison.
        comparer = self._comparer
        again = has_fallback or (comparer is not None and not comparer.knows_truth)
        self.frees = self.frees and not again
        self._reach_all(self.retain_graph or again)
        if self.problems and not lenient:
            if not has_fallback:
                self._raise_uncovered(self.problems)
            wrong = proof.wrong if proof is not None else frozenset()
            found = self._by_fallback(self.problems.keys() - wrong, self.enclosing)
            found |= self._by_fallback(self.problems.keys() & wrong, [])
            self._hand_on(found)
        rest = self._params.keys() - self._handed_on - self.problems.keys()
        if rest:
            ordered = [name for name in self._params if name in rest]
            self._hand_on({name: self._small.pop(name, []) for name in ordered})
        self._conclude(key)
        for factors in self._waiting or []:
            self.receive(factors)

    def run_without_samples(self) -> None:
        """Gives answers of shape ``(0, ...)``; adds to ``.grad`` what autograd adds."""
        if self.accumulate is not None:
            xla_replica.backward(self._total(), retain_graph=self.retain_graph)
        self.receive(self.factors_of({name: [] for name in self._params}))

    def _total(self) -> torch.Tensor:
        """Returns what the pass is of."""
        mean = self.accumulate == "mean"
        total = self.losses.mean() if mean else self.losses.sum()
        scale = self.capture.scale
        return total * scale if scale != 1 else total

    def _start_comparing(
        self, proof: comparison.Proof | None, reordered: bool
    ) -> Comparer | None:
        """Returns a comparer; None if nothing has to be compared in this capture."""
        check, scale = self.capture.check, self.capture.scale
        if check == "never":
            return None
        # Where the order of samples is data, a proof says nothing about another order.
        if check == "always" or reordered:
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
        dtypes = graph.inventory(self.losses).dtypes
        comparer = Comparer(self.losses, params, whole, scale, dtypes)
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
        if not self._calls:
            return
        compares = self._comparer is not None
        taker = self._taker = None if compares or self.problems else self.taker
        waits: set[int] = set()
        for number, call in enumerate(self._calls):
            self._missing.update(set(call.owner.params.values()))
            if taker is not None and taker.prepare(call) and self._may_read:
                waits.add(number)
        edges = [call.region.output for call in self._calls]
        del call
        nodes = [edge.node for edge in edges]
        if self.accumulate is None:
            lowest, passed = graph.lowest(self.losses.grad_fn, nodes)
        else:
            lowest, passed = set(), set(nodes)
        ends = [number for number, node in enumerate(nodes) if node in lowest]
        handles = []

        def look(number: int, output: int, gradients: Sequence[torch.Tensor]) -> None:
            self._reach(number, gradients[output])

        # What has come to each call, and waits.
        waiting: list[list[Sequence[torch.Tensor]]] = [[] for _ in nodes]
        ends_waiting = self._ends_of_waiting(waits)

        def take_waiting(last: int | None, *gradients: Sequence[torch.Tensor]) -> None:
            if last is not None:
                waiting[last] += gradients
            with forms.full_precision(self.losses.device):
                for number, each in enumerate(waiting):
                    if each:
                        gradient = each.pop()[edges[number].output_nr]
                        self._reach_inside(number, gradient)
                        del gradient

        try:
            for number, node in enumerate(nodes):
                if node not in passed:
                    if node not in lowest:
                        self._reach(number, None)
                    continue
                if number not in waits:
                    hook = functools.partial(look, number, edges[number].output_nr)
                elif number in ends_waiting:
                    hook = functools.partial(take_waiting, number)
                else:
                    hook = waiting[number].append
                handles.append(node.register_prehook(hook))
            asked = [edges[number] for number in ends]
            del node, nodes, lowest, passed
            total = self._total()
            gradients: Sequence[torch.Tensor | None] = ()
            if self.accumulate is None:
                gradients = xla_replica.grad(
                    total, asked, retain_graph=retain_graph, allow_unused=True
                )
            else:
                xla_replica.backward(total, retain_graph=retain_graph)
        finally:
            for handle in handles:
                handle.remove()
        take_waiting(None)
        for number, gradient in zip(ends, gradients):
            self._reach(number, gradient)
        if self.accumulate is not None and any(self._calls):
            # A module may take no gradient of an input: none comes to calls above it.
            nodes = [edge.node for edge in edges]
            passed = graph.reachable(self.losses.grad_fn, nodes)
            for number, node in enumerate(nodes):
                if self._calls[number] is not None and node not in passed:
                    self._reach(number, None)
        unseen = [str(call.owner) for call in self._calls if call is not None]
        if unseen:
            raise PerSampleError(
                f"the backward pass never came to {', '.join(unseen)}, on which the "
                "losses depend: this is a defect of per_sample_grad; please report it"
            )

    def _ends_of_waiting(self, waits: Collection[int]) -> set[int]:
        """Returns the calls at which what has come so far is taken."""
        found, total = set(), 0
        for number in sorted(waits, reverse=True):
            call = self._calls[number]
            assert call is not None
            numbers = call.shape.numel() + sum(
                each.numel()
                for each in call.call.args
                if isinstance(each, torch.Tensor)
            )
            total += numbers * self.losses.itemsize
            if total > WAITING:
                found.add(number)
                total = 0
        return found

    def _reach(self, number: int, gradient: torch.Tensor | None) -> None:
        with forms.full_precision(self.losses.device):
            self._reach_inside(number, gradient)

    def _reach_inside(self, number: int, gradient: torch.Tensor | None) -> None:
        """Applies a call's rule, in `forms.full_precision`."""
        call = self._calls[number]
        assert call is not None
        names = call.owner.params.values()
        if gradient is not None:
            if gradient.requires_grad or gradient.shape != call.shape:
                gradient = gradient.detach().reshape(call.shape)
            if self._taker is not None and self._taker.take(call, gradient):
                self._handed_on.update(names)
            else:
                self._apply(call, gradient)
        size = call.shape.numel()
        self._calls[number] = call = None  # its arguments can be freed
        complete: dict[str, list[Contribution]] = {}
        for name in dict.fromkeys(names):
            self._missing[name] -= 1
            if self._missing[name] or name in self.problems:
                continue
            if name not in self._handed_on:
                uses = forms.merge(self._parts.pop(name, []))
                if not self._keeps_small(name, uses):
                    complete[name] = uses
            elif name in self._parts:  # the taker has others of its uses
                complete[name] = forms.merge(self._parts.pop(name))
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
                    return True
        return False

    def _apply(self, call: RecordedCall, gradient: torch.Tensor) -> None:
        params = call.owner.params
        if self._comparer is not None:
            self._comparer.witness(
                call.call, params.values(), gradient, self._multiplier
            )
        wanted = {i: name for i, name in params.items() if name not in self.problems}
        if not wanted:
            return
        try:
            found = self._contributions(call, gradient)
            missing = sorted(set(wanted) - set(found))
            if missing:
                raise Refusal(f"its rule returned nothing for {', '.join(missing)}")
            parts = {
                inner: forms.regroup(forms.widened(found[inner]), len(self.losses))
                for inner in wanted
            }
        except Refusal as refusal:
            for name in dict.fromkeys(params.values()):
                self.problems.setdefault(name, []).append(f"{call.owner}: {refusal}")
                self._parts.pop(name, None)
            return
        for inner, part in parts.items():
            self._parts.setdefault(wanted[inner], []).append(part)

    def _contributions(
        self, call: RecordedCall, gradient: torch.Tensor
    ) -> Mapping[str, Contribution]:
        """Applies the rule to a gradient whose rows belong to the samples."""
        gradient, num_samples = call.call.batch_first(gradient), len(self.losses)
        rows = gradient.shape[0]
        if rows == 0 or rows % num_samples:
            raise Refusal(recording.why_no_samples(call, num_samples))
        if rows != num_samples and self.capture.check == "never":
            raise Refusal(
                f"it was called with {rows} rows for {num_samples} samples; that "
                "each owns consecutive ones is only believed when checked: do not pass "
                'check="never"'
            )
        return call.owner.rule(call.call, gradient)

    def _hand_on(self, merged: Mapping[str, Sequence[Contribution]]) -> None:
        # Half of four bytes for each number that is not needed any more.
        more = 2 * self._passed if self.frees and self.capture.budget is None else 0
        factors = self.factors_of(merged, more)
        if self._comparer is not None:
            self._comparer.add(factors)
        self._handed_on.update(merged)
        if self._waiting is None:
            self.receive(factors)
        else:
            self._waiting.append(factors)

    def factors_of(
        self, merged: Mapping[str, Sequence[Contribution]], more: int = 0
    ) -> Factors:
        """Returns the parameters' factors; temporaries may take ``more`` bytes."""
        return Factors(
            {name: tuple(self._params[name].shape) for name in merged},
            merged,
            self.losses.detach(),
            multiplier=self._multiplier,
            method=self.capture.method,
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
        found = self._fallback.gradients(self.losses, params, calls)
        return {
            name: [
                forms.multiplied(forms.widened(forms.Dense(g)), 1 / self._multiplier)
            ]
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
            comparer.expect(self.retain_graph or self._fallback is not None)
        self.compared = comparer.result()
        self._cancelling |= self.compared.cancelling
        if self.reported:
            return
        wrong = self.compared.wrong if self._fallback is not None else {}
        if wrong:
            comparer.expect(retain_graph=True)
            self._hand_on(self._by_fallback(wrong, []))
            self.compared = comparer.result()
        comparison.judge(self.compared)
        comparison.remember(self.capture.model, key, self.compared, wrong)

    def _raise_uncovered(self, problems: Mapping[str, Sequence[str]]) -> None:
        by_reason: dict[str, list[str]] = {}
        for name, reasons in problems.items():
            by_reason.setdefault("; ".join(reasons), []).append(name)
        lines = "".join(
            f"\n  {', '.join(names)}: {reason}" for reason, names in by_reason.items()
        )
        remark = "" if self.called else self._why_uncalled()
        fallback = (
            'fallback="batched" (what uses them runs once more, vectorised) '
            'or, where that fails, fallback="loop" (B backward passes of the batch)'
        )
        if xla_replica.traits(self.losses).is_lazy:
            fallback = 'fallback="batched" (B backward passes of the batch at once)'
        raise CoverageError(
            "these parameters have uses that no layer rule accounts for:"
            f"{lines}\n{remark}Register a rule for the module "
            "(register_rule, the cheapest), leave the parameters out (params=), or "
            f"pass {fallback}"
        )

    def _why_uncalled(self) -> str:
        """Returns the likely cause where no module's hook has run."""
        if "CompiledFunctionBackward" in graph.inventory(self.losses).names:
            return (
                "They are used by what torch.compile has compiled, which calls no "
                "hooks: call the model in the capture, not a compiled function. (A "
                "compiled module runs as it was written if it is the one that is "
                "captured: capture(compiled).) "
            )
        return (
            "No module with any of them was called inside the capture: was the forward "
            "pass run before it? "
        )
