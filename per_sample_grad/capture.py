"""Recording one forward pass, and the backward pass that makes the factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from per_sample_grad import graph, verify
from per_sample_grad.answers import added
from per_sample_grad.assembly import Assembly, Problems, Receiver
from per_sample_grad.contributions import Contribution
from per_sample_grad.errors import CoverageError
from per_sample_grad.factors import Factors
from per_sample_grad.fallback import FALLBACKS, Fallback
from per_sample_grad.plan import METHODS, Method, default_budget
from per_sample_grad.recording import (
    Recorder,
    Use,
    check_versions,
    refuse_hidden,
    refuse_hooked,
    why_outside,
)
from per_sample_grad.selection import Selection, selected

_T = TypeVar("_T")


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


class Capture:
    """Records the forward pass of a model; see `capture`."""

    def __init__(
        self,
        model: nn.Module,
        params: Selection = None,
        *,
        batch_dim: int | Mapping[str, int] = 0,
        fallback: Fallback = "error",
        check: verify.Check = "first",
        method: Method = "auto",
        budget: int | None = None,
        scale: float = 1.0,
    ) -> None:
        _require("fallback", fallback, FALLBACKS)
        _require("check", check, verify.CHECKS)
        _require("method", method, METHODS)
        if budget is not None and budget < 1:
            raise ValueError(f"budget={budget} bytes; give at least 1")
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(
                f"scale={scale}; give a positive number, best a power of 2"
            )
        self.model = model
        self.params = selected(model, params)
        refuse_hooked(self.params)
        self._fallback = fallback
        self._check = check
        self._method = method
        self._budget = budget
        self._scale = scale
        self._names = {id(value): name for name, value in self.params.items()}
        self._recorder = Recorder(model, self._names, batch_dim)
        self._entered = self._answered = False

    def __enter__(self) -> Capture:
        if self._entered:
            raise RuntimeError("this capture was used already; make another")
        self._recorder.start()
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del error, trace
        self._recorder.stop()
        if kind is not None:
            self._recorder.uses.clear()
            self._entered = False

    def backward(self, losses: torch.Tensor, *, retain_graph: bool = False) -> Factors:
        """One backward pass, for activations only: what every answer is made of.

        Args:
            losses: ``(B,)``, any float dtype: the loss of each sample.
            retain_graph: Keep the graph for another backward pass of your own.

        Returns:
            The factors of every sample's gradient. No ``.grad`` changes.

        Raises:
            ValueError: ``losses`` is no vector with a graph.
            RuntimeError: Nothing was recorded, or there was a backward pass already.
            CoverageError: Some use of a parameter is not accounted for.
            CouplingError: The answer differs from autograd's.
        """
        merged: dict[str, Sequence[Contribution]] = {}

        def keep(name: str, factors: Factors) -> None:
            merged[name] = factors.contributions(name)

        found = self.run(losses, keep, retain_graph)
        if found.compared is not None:
            verify.judge(found.compared)
        in_order = {name: merged[name] for name in self.params}
        return self._factors(losses, in_order, found.budget)

    def stream(
        self,
        losses: torch.Tensor,
        answer: Callable[[Factors], _T],
        *,
        retain_graph: bool = False,
    ) -> _T:
        """An answer that is a sum over parameters, in the memory of training.

        `backward` keeps all factors, so that every answer can be asked for. Here
        ``answer`` is asked of a few parameters at a time, as soon as the backward pass
        has come to them, and their factors are gone before it goes on. (With a fallback
        the factors are kept, and it is asked of all parameters at once.)

        Args:
            losses: ``(B,)``, as for `backward`.
            answer: From `Factors` of some parameters to a tensor, or tuples, lists and
                dicts of such. Tensors are added, those of dicts by name: a
                `Factors.norms` must be ``squared=True``, a vector for `Factors.dot`
                have the names in ``factors.shapes``. It may run in another thread.
            retain_graph: Keep the graph for another backward pass of your own.

        Returns:
            The sum of the answers.

        Raises:
            PerSampleError: As `backward`.

        Example:
            >>> model = nn.Linear(2, 1, bias=False)
            >>> with capture(model) as recorded:
            ...     losses = model(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).sum(1)
            >>> recorded.stream(losses, lambda factors: factors.norms(squared=True))
            tensor([25.,  4.])
        """
        if self._fallback != "error":
            return answer(self.backward(losses, retain_graph=retain_graph))
        answers: list[_T] = []

        def ask(name: str, factors: Factors) -> None:
            del name
            value = answer(factors)
            answers[:] = [added(answers[0], value) if answers else value]

        found = self.run(losses, ask, retain_graph, frees=not retain_graph)
        if found.compared is not None:
            verify.judge(found.compared)
        return answers[0]

    def assemble(self, losses: torch.Tensor, retain_graph: bool) -> Found:
        """Which calls the losses depend on, and which no rule accounts for."""
        return self.run(losses, lambda *_: None, retain_graph, reported=True)

    def run(
        self,
        losses: torch.Tensor,
        receive: Callable[[str, Factors], None],
        retain_graph: bool,
        *,
        reported: bool = False,
        frees: bool = False,
    ) -> Found:
        """The backward pass; hands on the factors of one parameter after the other.

        Args:
            losses: ``(B,)``.
            receive: Takes a name and the parameter's factors; those of a fallback
                after, and maybe instead of, those of a rule.
            retain_graph: Keep the graph.
            reported: What is missing or wrong is a report, no error, and no fallback
                takes the place of a wrong rule; without a fallback nothing is compared.
            frees: Whether what the pass has left behind is free: temporaries may then
                take the place of half of it.
        """
        self._recorder.stop()
        _check_losses(losses)
        self._check_state()
        refuse_hooked(self.params)
        recorded = self._recorder.uses
        reached = graph.walk(losses, [use.region for use in recorded], self._names)
        uses = [recorded[number] for number in sorted(reached.regions)]
        check_versions(uses)
        refuse_hidden(self._recorder.unrecorded, uses, reached, self._names)
        key = verify.signature(losses, uses, self.params, reached)
        has_fallback = FALLBACKS[self._fallback] is not None
        outside = self._outside(reached.outside)
        if outside and not (has_fallback or reported):
            self._raise_uncovered(outside)
        proof = verify.proof_of(self.model, key)
        known = {}
        if proof is not None and has_fallback and not reported:
            known = {
                name: ["its rule is wrong for this structure"] for name in proof.wrong
            }
        due = verify.due(self._check, proof, self.params, has_fallback)
        comparer = None
        if due.names and (has_fallback or not reported):
            chosen = {n: param for n, param in self.params.items() if n in due.names}
            comparer = verify.Comparer(
                losses, chosen, whole=due.whole, scale=self._scale
            )
            if due.at_once:
                comparer.expect(retain_graph=True)
        handed: set[str] = set()

        # Without a reference to what refers to it: a cycle would keep tensors, and what
        # is alive is computed on a lazy device.
        def complete(name: str, merged: list[Contribution], passed: int) -> None:
            more = 2 * passed if frees and self._budget is None else 0
            factors = self._factors(losses, {name: merged}, budget + more)
            if comparer is not None and name in comparer.params:
                comparer.add(name, factors)
            handed.add(name)
            receive(name, factors)

        budget = self._budget or _budget_beside(uses, losses)
        assembly = Assembly(
            uses,
            self._names,
            len(losses),
            may_fold=self._check != "never",
            scale=self._scale,
            left_out={**known, **outside},
            receive=complete,
            witness=None if comparer is None else comparer.witness,
        )
        called = tuple(_called(use, self._names) for use in uses)
        recorded.clear()
        del uses
        self._answered = True
        # A fallback needs the graph once more, and so may a comparison.
        again = has_fallback or (comparer is not None and not due.at_once)
        frees = frees and not again
        assembly.run(losses, retain_graph or again)
        problems = assembly.problems
        if problems and (has_fallback or not reported):
            self._fall_back(losses, problems, complete)
        for name in self.params:
            if name not in handed and name not in problems:
                complete(name, [], 0)
        if comparer is None or not (due.at_once or not comparer.nothing_arrived()):
            return Found(called, problems, None, budget)
        if not due.at_once:
            comparer.expect(retain_graph or has_fallback)
        compared = comparer.result()
        if not reported:
            wrong = compared.wrong if has_fallback else {}
            if wrong:
                compared = self._corrected(
                    losses, comparer.of(wrong), compared, receive, budget
                )
            verify.warn_of_underflow(compared)
            if not compared.wrong:
                verify.remember(self.model, key, compared, wrong)
        return Found(called, problems, compared, budget)

    def _corrected(
        self,
        losses: torch.Tensor,
        comparer: verify.Comparer,
        compared: verify.Comparison,
        receive: Callable[[str, Factors], None],
        budget: int,
    ) -> verify.Comparison:
        """With the fallback's answers in place of wrong ones."""
        fallback = FALLBACKS[self._fallback]
        assert fallback is not None
        comparer.expect(retain_graph=True)
        for name, dense in fallback(losses, comparer.params).items():
            factors = self._factors(losses, {name: [dense]}, budget)
            comparer.add(name, factors)
            receive(name, factors)
        errors = {**compared.errors, **comparer.result().errors}
        return dataclasses.replace(compared, errors=errors)

    def _check_state(self) -> None:
        if self._answered:
            raise RuntimeError(
                "this capture had its backward pass, which used up what was recorded; "
                "ask the factors it returned, or record the forward pass again with "
                "another capture"
            )
        if not self._entered:
            raise RuntimeError(
                "nothing was recorded: run the forward pass inside "
                "`with capture(model) as recorded:`, then call "
                "recorded.backward(losses)"
            )

    def _factors(
        self,
        losses: torch.Tensor,
        merged: Mapping[str, Sequence[Contribution]],
        budget: int,
    ) -> Factors:
        """Of these parameters."""
        return Factors(
            {name: tuple(self.params[name].shape) for name in merged},
            merged,
            losses.detach(),
            method=self._method,
            budget=budget,
        )

    def _fall_back(
        self,
        losses: torch.Tensor,
        problems: Problems,
        complete: Receiver,
    ) -> None:
        fallback = FALLBACKS[self._fallback]
        if fallback is None:
            self._raise_uncovered(problems)
            return
        dense = fallback(losses, {name: self.params[name] for name in problems})
        for name, value in dense.items():
            complete(name, [value], 0)

    def _outside(self, counts: Mapping[str, int]) -> Problems:
        """Uses that no rule sees, and why not."""
        return {
            name: [
                f"{number} use(s) outside any module with a rule ("
                f"{why_outside(self.model, self.params[name])})"
            ]
            for name, number in counts.items()
        }

    def _raise_uncovered(self, problems: Problems) -> None:
        lines = "".join(
            f"\n  {name}: {'; '.join(reasons)}" for name, reasons in problems.items()
        )
        raise CoverageError(
            "these parameters have uses that no layer rule accounts for:"
            f"{lines}\n{self._remark()}Register a rule for the module "
            "(register_rule), leave the "
            'parameters out (params=), or pass fallback="loop" (B backward passes '
            'for them, exact) or fallback="batched" (one vectorised one)'
        )

    def _remark(self) -> str:
        if self._recorder.called:
            return ""
        return (
            "No module with any of them was called inside the capture: was the forward "
            "pass run before it? "
        )


def capture(
    model: nn.Module,
    params: Selection = None,
    *,
    batch_dim: int | Mapping[str, int] = 0,
    fallback: Fallback = "error",
    check: verify.Check = "first",
    method: Method = "auto",
    budget: int | None = None,
    scale: float = 1.0,
) -> Capture:
    """Records a forward pass, for every sample's gradient, norm and inner products.

    The model is an ordinary one and stays as it is: hooks are there inside the block
    only. Nothing is recorded of parameters that do not require grad.

    Args:
        model: Any module. BatchNorm must not use the batch's statistics.
        params: Names of parameters, or a predicate of name and parameter; None: all
            that require grad.
        batch_dim: The dimension that counts samples in what modules take and return,
            or that by module name, ``""`` for the others. A dimension of k times B
            numbers counts as k consecutive rows of each sample.
        fallback: For parameters that no rule accounts for: ``"error"``, ``"loop"`` (B
            backward passes, exact) or ``"batched"`` (one, vectorised by torch). Also
            for those whose rule turns out wrong when it is checked.
        check: When to compare with autograd, for one more backward pass and, on a
            lazy device, one read-back: ``"first"`` time for each structure (modules
            called, shapes), ``"always"`` or ``"never"``.
        method: Form of products: ``"auto"`` as planned, ``"factored"`` or
            ``"materialized"`` (slower, and exact where positions cancel).
        budget: Bytes of temporary tensors; None: a quarter of what the modules with
            rules gave, at least 1 MiB on a CPU and 64 MiB elsewhere.
        scale: Losses are multiplied by it in the backward pass, and answers divided:
            against underflow in float16, as a gradient scaler does. A power of two.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with capture(model) as recorded:
        ...     losses = model(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).sum(1)
        >>> recorded.backward(losses).norms()
        tensor([5., 2.])
    """
    return Capture(
        model,
        params,
        batch_dim=batch_dim,
        fallback=fallback,
        check=check,
        method=method,
        budget=budget,
        scale=scale,
    )


def _called(use: Use, names: Mapping[int, str]) -> Called:
    params = (names.get(id(param)) for param in use.call.module.parameters())
    return Called(use.name, str(use), frozenset(name for name in params if name))


def _budget_beside(uses: Sequence[Use], losses: torch.Tensor) -> int:
    """Of temporaries, which are in float32, from what modules gave."""
    recorded = sum(use.shape.numel() * 4 for use in uses)
    return default_budget(recorded, losses.device.type)


def _check_losses(losses: torch.Tensor) -> None:
    if losses.dim() != 1 or not losses.dtype.is_floating_point or not len(losses):
        raise ValueError(
            f"losses of shape {tuple(losses.shape)} and dtype {losses.dtype}: give one "
            'number per sample, shape (B,), for instance with reduction="none"; for '
            "losses per token see per_sample_grad.token_cross_entropy"
        )
    if not losses.requires_grad:
        raise ValueError(
            "losses have no graph: compute them inside the capture from the model's "
            "output, with gradients enabled"
        )


def _require(what: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{what}={value!r}; allowed are {', '.join(allowed)}")
