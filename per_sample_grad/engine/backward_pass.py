"""One backward pass: the factors of some parameters after the other, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from per_sample_grad.engine import comparison
from per_sample_grad.engine import verification as verify
from per_sample_grad.engine.assembly import Assembly, Problems
from per_sample_grad.engine.comparison import Comparer, Comparison
from per_sample_grad.engine.fallback import FALLBACKS, Fallback
from per_sample_grad.engine.graph import Reached
from per_sample_grad.engine.recording import Use, why_outside
from per_sample_grad.errors import CoverageError
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.factors.plan import Method, default_budget


@dataclasses.dataclass(frozen=True)
class Options:
    """What `capture` was told, see there."""

    fallback: Fallback
    check: verify.Check
    method: Method
    budget: int | None
    scale: float


@dataclasses.dataclass(frozen=True)
class Called:
    """A recorded call that the losses depend on.

    Attributes:
        name: Of the module in the model.
        label: For people.
        params: Names of its selected parameters.
    """

    name: str
    label: str
    params: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Found:
    """What one backward pass found, complete or not.

    Attributes:
        uses: In the order of the calls.
        problems: Why a parameter has no contributions, by parameter.
        compared: With autograd, if that was due.
        budget: Bytes of temporaries.
    """

    uses: Sequence[Called]
    problems: Problems
    compared: verify.Comparison | None
    budget: int


class BackwardPass:
    """What is fixed before it starts."""

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, nn.Parameter],
        options: Options,
        losses: torch.Tensor,
        receive: Callable[[Factors], None],
        *,
        retain_graph: bool,
        reported: bool,
        frees: bool,
        remark: str,
    ) -> None:
        """Args are those of `Capture._run`, and a remark for people in errors."""
        self._model = model
        self._params = params
        self._names = {id(value): name for name, value in params.items()}
        self._options = options
        self._losses = losses
        self._receive = receive
        self._retain_graph = retain_graph
        self._reported = reported
        self._frees = frees
        self._remark = remark
        self._fallback = FALLBACKS[options.fallback]
        # Without a fallback a report says what is missing, and not what is wrong.
        self._lenient = reported and self._fallback is None
        self._budget = 0
        self._handed: set[str] = set()

    def run(self, uses: list[Use], reached: Reached) -> Found:
        """Runs it; ``uses`` is emptied, so that each can go when it was reached."""
        key = verify.signature(self._losses, uses, self._params, reached)
        outside = self._outside(reached.outside)
        if outside and self._fallback is None and not self._reported:
            self._raise_uncovered(outside)
        proof = verify.proof_of(self._model, key)
        due = verify.due(
            self._options.check,
            proof,
            self._params,
            has_fallback=self._fallback is not None,
            reordered=reached.reordered,
        )
        comparer = None if self._lenient else self._comparer(due)
        self._budget = self._options.budget or _budget_beside(uses, self._losses)
        called = tuple(_called(use, self._names) for use in uses)
        left_out = {**self._known_wrong(proof), **outside}
        problems = self._assemble(uses, due, comparer, left_out)
        rest = set(self._params) - self._handed - set(problems)
        if rest:
            unused = {name: [] for name in self._params if name in rest}
            self._hand_on(unused, 0, comparer)
        compared = self._concluded(due, comparer)
        if compared is not None and not self._reported:
            compared = self._corrected(compared, comparer, key)
        return Found(called, problems, compared, self._budget)

    def _comparer(self, due: verify.Due) -> Comparer | None:
        if not due.names:
            return None
        chosen = {n: param for n, param in self._params.items() if n in due.names}
        comparer = Comparer(
            self._losses, chosen, whole=due.whole, scale=self._options.scale
        )
        if due.at_once:
            comparer.expect(retain_graph=True)
        return comparer

    def _assemble(
        self,
        uses: list[Use],
        due: verify.Due,
        comparer: Comparer | None,
        left_out: Problems,
    ) -> Problems:
        """The pass itself, and then the fallback."""
        # A fallback needs the graph once more, and so may a comparison.
        again = self._fallback is not None or (comparer is not None and not due.at_once)
        self._frees = self._frees and not again

        # Not a method of what has the assembly: a cycle would keep tensors, and what is
        # alive is computed on a lazy device.
        def complete(merged: dict[str, list[Contribution]], passed: int) -> None:
            self._hand_on(merged, passed, comparer)

        assembly = Assembly(
            uses,
            self._names,
            len(self._losses),
            may_fold=self._options.check != "never",
            scale=self._options.scale,
            left_out=left_out,
            receive=complete,
            witness=None if comparer is None else comparer.witness,
        )
        uses.clear()
        assembly.run(self._losses, self._retain_graph or again)
        problems = assembly.problems
        if problems and not self._lenient:
            if self._fallback is None:
                self._raise_uncovered(problems)
            dense = self._by_fallback(problems)
            complete({name: [value] for name, value in dense.items()}, 0)
        return problems

    def _hand_on(
        self,
        merged: Mapping[str, list[Contribution]],
        passed: int,
        comparer: Comparer | None,
    ) -> None:
        # Half of four bytes for each number that is not needed any more.
        more = 2 * passed if self._frees and self._options.budget is None else 0
        factors = self._factors(merged, self._budget + more)
        if comparer is not None:
            comparer.add(factors)
        self._handed.update(merged)
        self._receive(factors)

    def _concluded(
        self, due: verify.Due, comparer: Comparer | None
    ) -> Comparison | None:
        if comparer is None or not (due.at_once or not comparer.nothing_arrived()):
            return None
        if not due.at_once:
            comparer.expect(self._retain_graph or self._fallback is not None)
        return comparer.result()

    def _corrected(
        self, compared: Comparison, comparer: Comparer | None, key: object
    ) -> Comparison:
        """With a fallback's answers in place of wrong ones; remembered if right."""
        assert comparer is not None
        wrong = compared.wrong if self._fallback is not None else {}
        if wrong:
            again = comparer.of(wrong)
            again.expect(retain_graph=True)
            dense = self._by_fallback(wrong)
            merged = {name: [value] for name, value in dense.items()}
            factors = self._factors(merged, self._budget)
            again.add(factors)
            self._receive(factors)
            errors = {**compared.errors, **again.result().errors}
            compared = dataclasses.replace(compared, errors=errors)
        comparison.warn_of_underflow(compared)
        if not compared.wrong:
            verify.remember(self._model, key, compared, wrong)
        return compared

    def _by_fallback(self, names: Collection[str]) -> Mapping[str, Contribution]:
        assert self._fallback is not None
        return self._fallback(
            self._losses, {name: self._params[name] for name in names}
        )

    def _factors(
        self, merged: Mapping[str, Sequence[Contribution]], budget: int
    ) -> Factors:
        return factors_of(self._losses, merged, self._params, self._options, budget)

    def _known_wrong(self, proof: verify.Proof | None) -> Problems:
        if proof is None or self._fallback is None or self._reported:
            return {}
        return {name: ["its rule is wrong for this structure"] for name in proof.wrong}

    def _outside(self, counts: Mapping[str, int]) -> Problems:
        """Uses that no rule sees, and why not."""
        return {
            name: [
                f"{number} use(s) outside any module with a rule ("
                f"{why_outside(self._model, self._params[name])})"
            ]
            for name, number in counts.items()
        }

    def _raise_uncovered(self, problems: Problems) -> None:
        lines = "".join(
            f"\n  {name}: {'; '.join(reasons)}" for name, reasons in problems.items()
        )
        raise CoverageError(
            "these parameters have uses that no layer rule accounts for:"
            f"{lines}\n{self._remark}Register a rule for the module "
            "(register_rule), leave the "
            'parameters out (params=), or pass fallback="loop" (B backward passes '
            'for them, exact) or fallback="batched" (one vectorised one)'
        )


def factors_of(
    losses: torch.Tensor,
    merged: Mapping[str, Sequence[Contribution]],
    params: Mapping[str, nn.Parameter],
    options: Options,
    budget: int,
) -> Factors:
    """The factors of these parameters."""
    return Factors(
        {name: tuple(params[name].shape) for name in merged},
        merged,
        losses.detach(),
        method=options.method,
        budget=budget,
    )


def _called(use: Use, names: Mapping[int, str]) -> Called:
    params = (names.get(id(param)) for param in use.call.module.parameters())
    return Called(use.name, str(use), frozenset(name for name in params if name))


def _budget_beside(uses: Sequence[Use], losses: torch.Tensor) -> int:
    """Of temporaries, which are in float32, from what modules gave."""
    recorded = sum(use.shape.numel() * 4 for use in uses)
    return default_budget(recorded, losses.device)
