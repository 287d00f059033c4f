"""A report on every parameter's every use, and a proof that the answers are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from per_sample_grad import verify
from per_sample_grad.capture import Capture
from per_sample_grad.fallback import FALLBACKS
from per_sample_grad.plan import DEFAULT_BUDGET, Choice
from per_sample_grad.selection import Selection


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
    budget: int = DEFAULT_BUDGET,
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
    # The graph is kept for the parameters with problems, which a loop answers.
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
    found = capture.assemble(losses, retain_graph=True)
    loop = FALLBACKS["loop"]
    assert loop is not None
    dense = loop(losses, {name: capture.params[name] for name in found.problems})
    parts = {**found.parts, **{name: [value] for name, value in dense.items()}}
    factors = capture.factors(losses, parts, found)
    errors = verify.compare(
        losses, capture.params, factors, found.noises, retain_graph=False
    ).errors
    tolerance = verify.tolerance_of(losses, capture.params, factors)
    plans = {
        "norms": factors.plan("norms").choices,
        "gram": factors.plan("gram").choices,
    }
    ids = {id(param): name for name, param in capture.params.items()}
    uses: dict[str, list[str]] = {name: [] for name in capture.params}
    for use in found.uses:
        for param in use.call.module.parameters():
            if id(param) in ids:
                uses[ids[id(param)]].append(str(use))
    report = {}
    for name in capture.params:
        report[name] = ParameterCoverage(
            uses=tuple(uses[name]),
            problems=tuple(found.problems.get(name, ())),
            error=errors[name],
            correct=errors[name] <= tolerance,
            plan={q: plan[name] for q, plan in plans.items() if name in plan},
        )
    return Coverage(report)
