"""A report on every parameter's every use, and a proof that the answers are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from per_sample_grad.engine.capturing import Capture
from per_sample_grad.engine.selection import Selection
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.plan import QUANTITIES, Choice


@dataclasses.dataclass(frozen=True)
class ParameterCoverage:
    """One parameter's.

    Attributes:
        uses: The calls a rule accounts for, as ``"Linear 'head'"``.
        problems: Uses that no rule accounts for, and why.
        error: Relative difference from autograd's gradient of a randomly weighted sum
            of the losses; NaN where that is not finite.
        correct: Whether that is rounding.
        plan: How its share of the ``"norms"`` and the ``"gram"`` will be computed;
            empty if the losses do not depend on it.
    """

    uses: tuple[str, ...]
    problems: tuple[str, ...]
    error: float
    correct: bool
    plan: Mapping[str, Choice]


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Every selected parameter's; `str` is a table for people."""

    parameters: Mapping[str, ParameterCoverage]

    @property
    def complete(self) -> bool:
        """Whether rules account for every use, correctly: no fallback is needed."""
        return all(
            found.correct and not found.problems for found in self.parameters.values()
        )

    def __str__(self) -> str:
        width = max(len(name) for name in self.parameters)
        lines = []
        for name, found in self.parameters.items():
            forms = ", ".join(
                f"{quantity} {choice.form}" for quantity, choice in found.plan.items()
            )
            if found.problems:
                state = "needs a fallback"
            else:
                state = "ok" if found.correct else "WRONG"
            what = "; ".join((*found.uses, *found.problems)) or "not used by the losses"
            lines.append(
                f"{name:<{width}}  {state}  (error {found.error:.1e})  {what}"
                + (f"  [{forms}]" if forms else "")
            )
        verdict = "complete" if self.complete else "NOT complete"
        return "\n".join([*lines, f"coverage is {verdict}"])


def coverage(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    batch: tuple[Any, ...],
    *,
    params: Selection = None,
    batch_dim: int | Mapping[str, int] = 0,
    budget: int | None = None,
) -> Coverage:
    """What `capture` will make of a model: rule by rule, use by use, and whether right.

    Raises no error where a capture would: the report names what is missing or wrong.
    Reads the device back once.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` gives the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``; a batch of the usual size, of ordinary data.
        params: As for `capture`.
        batch_dim: As for `capture`.
        budget: As for `capture`.

    Raises:
        CouplingError: The model has a BatchNorm that uses the batch's statistics.
        ValueError: ``loss_fn`` does not give one loss per sample.
    """
    capture = Capture(
        model,
        params,
        batch_dim=batch_dim,
        fallback="loop",
        check="always",
        budget=budget,
    )
    with capture:
        losses = loss_fn(model, *batch)
    plans: dict[str, dict[str, Choice]] = {}

    def plan(factors: Factors) -> None:
        tables = {q: factors.plan(q).choices for q in QUANTITIES}
        for name in factors.shapes:
            used = factors.contributions(name)
            plans[name] = {q: tables[q][name] for q in QUANTITIES} if used else {}

    found = capture._run(losses, plan, retain_graph=False, reported=True)
    assert found.compared is not None
    errors, tolerance = found.compared.errors, found.compared.tolerance
    return Coverage(
        {
            name: ParameterCoverage(
                uses=tuple(use.label for use in found.uses if name in use.params),
                problems=tuple(found.problems.get(name, ())),
                error=errors[name],
                correct=errors[name] <= tolerance,
                plan=plans[name],
            )
            for name in capture.params
        }
    )
