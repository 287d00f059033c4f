"""Recording one forward pass, and the backward pass that makes the factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from types import TracebackType

import torch
from torch import nn

from per_sample_grad import graph, verify
from per_sample_grad.assembly import Parts, Problems, assemble, gradients
from per_sample_grad.contributions import merge
from per_sample_grad.errors import CoverageError
from per_sample_grad.factors import Factors
from per_sample_grad.fallback import FALLBACKS, Fallback
from per_sample_grad.plan import DEFAULT_BUDGET, METHODS, Method
from per_sample_grad.recording import Recorder, Use, check_versions, refuse_hidden
from per_sample_grad.selection import Selection, selected


@dataclasses.dataclass(frozen=True)
class Assembled:
    """What one backward pass found, complete or not.

    Attributes:
        uses: Recorded calls that the losses depend on.
        parts: Contributions by parameter; those with problems lack some.
        problems: Why, by parameter.
        dtypes: Of the gradients of activations.
        check: Whether a comparison with autograd is due.
        signature: What makes the comparison hold for other captures.
        noises: If it is due, what rounding explains.
    """

    uses: Sequence[Use]
    parts: Parts
    problems: Problems
    dtypes: frozenset[torch.dtype]
    check: bool
    signature: Hashable
    noises: Mapping[str, torch.Tensor]


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
        budget: int = DEFAULT_BUDGET,
    ) -> None:
        _require("fallback", fallback, FALLBACKS)
        _require("check", check, verify.CHECKS)
        _require("method", method, METHODS)
        if budget < 1:
            raise ValueError(f"budget={budget} bytes; give at least 1")
        self.model = model
        self.params = selected(model, params)
        self._fallback = fallback
        self._check = check
        self._method = method
        self._budget = budget
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
        found = self.assemble(losses, retain_graph)
        parts = found.parts
        if found.problems:
            parts = {**parts, **self._fall_back(losses, found.problems)}
        factors = self.factors(losses, parts, found)
        if found.check:
            compared = verify.compare(
                losses, self.params, factors, found.noises, retain_graph
            )
            verify.judge(compared.errors, losses, self.params, factors)
            verify.remember(self.model, found.signature, compared)
        return factors

    def assemble(self, losses: torch.Tensor, retain_graph: bool) -> Assembled:
        """Runs the backward pass and the rules; for `coverage`."""
        self._recorder.stop()
        _check_losses(losses)
        self._check_state()
        recorded = self._recorder.uses
        reached = graph.walk(losses, [use.region for use in recorded], self._names)
        uses = [recorded[number] for number in sorted(reached.regions)]
        check_versions(uses)
        refuse_hidden(self._recorder.unrecorded, uses, reached, self._names)
        signature = verify.signature(losses, uses, self.params, reached)
        check = verify.is_due(self._check, self.model, signature)
        # A fallback and a check need the graph once more.
        keep = retain_graph or check or self._fallback != "error"
        grads = gradients(losses, uses, keep)
        parts, problems = assemble(
            uses, grads, self._names, len(losses), self._check != "never"
        )
        for name, number in reached.outside.items():
            problems.setdefault(name, []).append(
                f"{number} use(s) outside any module with a rule"
            )
        dtypes = frozenset(grad.dtype for grad in grads if grad is not None)
        noises = verify.noise(uses, grads, self._names) if check else {}
        recorded.clear()
        self._answered = True
        return Assembled(uses, parts, problems, dtypes, check, signature, noises)

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

    def factors(self, losses: torch.Tensor, parts: Parts, found: Assembled) -> Factors:
        """The factors of these contributions."""
        return Factors(
            {name: tuple(param.shape) for name, param in self.params.items()},
            {name: merge(parts.get(name, [])) for name in self.params},
            losses.detach(),
            method=self._method,
            budget=self._budget,
            seen_dtypes=found.dtypes,
        )

    def _fall_back(self, losses: torch.Tensor, problems: Problems) -> Parts:
        fallback = FALLBACKS[self._fallback]
        if fallback is None:
            lines = "".join(
                f"\n  {name}: {'; '.join(reasons)}"
                for name, reasons in problems.items()
            )
            raise CoverageError(
                "these parameters have uses that no layer rule accounts for:"
                f"{lines}\n{self._remark()}Register a rule for the module "
                "(register_rule), leave the "
                'parameters out (params=), or pass fallback="loop" (B backward passes '
                'for them, exact) or fallback="batched" (one vectorised one)'
            )
        dense = fallback(losses, {name: self.params[name] for name in problems})
        return {name: [value] for name, value in dense.items()}

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
    budget: int = DEFAULT_BUDGET,
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
            backward passes, exact) or ``"batched"`` (one, vectorised by torch).
        check: When to compare with autograd, for one more backward pass and, on a
            lazy device, one read-back: ``"first"`` time for each structure (modules
            called, shapes), ``"always"`` or ``"never"``.
        method: Form of products: ``"auto"`` as planned, ``"factored"`` or
            ``"materialized"`` (slower, and exact where positions cancel).
        budget: Bytes of temporary tensors per parameter.

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
    )


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
