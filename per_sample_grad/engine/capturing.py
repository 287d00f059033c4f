"""Recording one forward pass, and the backward pass that makes the factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from per_sample_grad.engine import comparison, graph
from per_sample_grad.engine import verification as verify
from per_sample_grad.engine.answers import added
from per_sample_grad.engine.backward_pass import (
    BackwardPass,
    Found,
    Options,
    factors_of,
)
from per_sample_grad.engine.fallback import FALLBACKS, Fallback
from per_sample_grad.engine.recording import (
    Recorder,
    check_versions,
    refuse_hidden,
    refuse_hooked,
)
from per_sample_grad.engine.selection import Selection, selected
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.factors.plan import METHODS, Method

_NOTHING_CALLED = (
    "No module with any of them was called inside the capture: was the forward pass "
    "run before it? "
)
_T = TypeVar("_T")


class Capture:
    """Records the forward pass of a model; see `capture`.

    Attributes:
        params: The selected parameters, by their first name in the model.
        compared: Whether the backward pass was compared with autograd.
    """

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
        self._options = Options(fallback, check, method, budget, scale)
        self._names = {id(value): name for name, value in self.params.items()}
        self._recorder = Recorder(model, self._names, batch_dim)
        self._entered = self._answered = False
        self.compared = False

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

        def keep(factors: Factors) -> None:
            merged.update({n: factors.contributions(n) for n in factors.shapes})

        found = self._run(losses, keep, retain_graph)
        if found.compared is not None:
            comparison.judge(found.compared)
        in_order = {name: merged[name] for name in self.params}
        return factors_of(losses, in_order, self.params, self._options, found.budget)

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
        if self._options.fallback != "error":
            return answer(self.backward(losses, retain_graph=retain_graph))
        answers: list[_T] = []

        def ask(factors: Factors) -> None:
            value = answer(factors)
            answers[:] = [added(answers[0], value) if answers else value]

        found = self._run(losses, ask, retain_graph, frees=not retain_graph)
        if found.compared is not None:
            comparison.judge(found.compared)
        return answers[0]

    def _assemble(self, losses: torch.Tensor, retain_graph: bool) -> Found:
        """Which calls the losses depend on, and which no rule accounts for."""
        return self._run(losses, lambda _: None, retain_graph, reported=True)

    def _run(
        self,
        losses: torch.Tensor,
        receive: Callable[[Factors], None],
        retain_graph: bool,
        *,
        reported: bool = False,
        frees: bool = False,
    ) -> Found:
        """The backward pass; hands on the factors of some parameters after the other.

        Args:
            losses: ``(B,)``.
            receive: Takes the factors of some parameters; those of a fallback after,
                and maybe instead of, those of a rule.
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
        reached = graph.walk(
            losses,
            [use.region for use in recorded],
            self._names,
            {0, *(use.call.batch_dim for use in recorded)},
        )
        uses = [recorded[number] for number in sorted(reached.regions)]
        check_versions(uses)
        refuse_hidden(self._recorder.unrecorded, uses, reached, self._names)
        recorded.clear()
        this = BackwardPass(
            self.model, self.params, self._options, losses, receive,
            retain_graph=retain_graph, reported=reported, frees=frees,
            remark="" if self._recorder.called else _NOTHING_CALLED,
        )  # fmt: skip
        self._answered = True
        found = this.run(uses, reached)
        self.compared = found.compared is not None
        return found

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
            called, shapes), ``"always"`` or ``"never"``. Where losses or activations
            are indexed along the batch (``losses[order]``), the order is data, and
            ``"first"`` compares every time. An order that is made otherwise, by a
            product with a matrix say, needs ``"always"``.
        method: Form of products: ``"auto"`` as planned, ``"factored"`` or
            ``"materialized"`` (slower, and exact where positions cancel).
        budget: Bytes of temporary tensors; None: half of what the modules with
            rules gave, at least 1 MiB on a CPU and 64 MiB elsewhere, at most 256 MiB.
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
