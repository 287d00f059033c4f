"""A report on every use of every parameter, and a proof that the answers are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from per_sample_grad.engine.capturing import capture
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.plan import QUANTITIES, Choice


@dataclasses.dataclass(frozen=True)
class ParameterCoverage:
    """What accounts for one parameter, and whether it is right.

    Attributes:
        uses: The calls that a rule accounts for, as ``"Linear 'head'"``.
        problems: Uses that no rule accounts for, and why.
        error: Relative difference from autograd's gradient of a randomly weighted sum
            of the losses; NaN where that is not finite.
        correct: Whether the error is no larger than rounding.
        plan: How the parameter's share of the ``"norms"`` and the ``"gram"`` will be
            computed; empty if the losses do not depend on it.
    """

    uses: tuple[str, ...]
    problems: tuple[str, ...]
    error: float
    correct: bool
    plan: Mapping[str, Choice]


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The coverage of every selected parameter; `str` is a table for people.

    Attributes:
        parameters: What accounts for each parameter, by its name.
    """

    parameters: Mapping[str, ParameterCoverage]

    @property
    def complete(self) -> bool:
        """Whether rules account for every use correctly: no fallback is needed."""
        return all(p.correct and not p.problems for p in self.parameters.values())

    def __str__(self) -> str:
        width = max(len(name) for name in self.parameters)
        lines = []
        for name, found in self.parameters.items():
            forms = ", ".join(f"{q} {choice.form}" for q, choice in found.plan.items())
            if found.problems:
                state = "needs a fallback"
            else:
                state = "ok" if found.correct else "WRONG"
            what = "; ".join((*found.uses, *found.problems)) or "not used by the losses"
            line = f"{name:<{width}}  {state}  (error {found.error:.1e})  {what}"
            lines.append(f"{line}  [{forms}]" if forms else line)
        verdict = "complete" if self.complete else "NOT complete"
        return "\n".join([*lines, f"coverage is {verdict}"])


def coverage(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    batch: tuple[Any, ...],
    **options: Any,
) -> Coverage:
    """Reports which rules `capture` will apply to a model, and whether they are right.

    Raises no error where a capture would: the report names what is missing or wrong.
    Reads back from the device once.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` gives the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``; a batch of the usual size, of ordinary data.
        **options: Options of `capture`, except ``fallback`` and ``check``.

    Raises:
        CouplingError: The model has a BatchNorm that uses the batch's statistics.
        PerSampleError: The device's autograd is wrong for an operation.
        ValueError: ``loss_fn`` does not give one loss per sample, or there is none.
    """
    with capture(model, fallback="loop", check="always", **options) as recorded:
        losses = loss_fn(model, *batch)
    if not len(losses):
        raise ValueError("coverage: the batch has no samples; give one that has some")
    plans: dict[str, dict[str, Choice]] = {}

    def plan(factors: Factors) -> None:
        tables = {q: factors.plan(q).choices for q in QUANTITIES}
        for name in factors.shapes:
            used = factors.merged[name]
            plans[name] = {q: tables[q][name] for q in QUANTITIES} if used else {}

    found = recorded._run(losses, plan, reported=True)
    assert found.compared is not None
    errors, tolerance = found.compared.errors, found.compared.tolerance
    return Coverage(
        {
            name: ParameterCoverage(
                uses=tuple(str(m) for m in found.modules if name in m.params.values()),
                problems=tuple(found.problems.get(name, ())),
                error=errors[name],
                correct=errors[name] <= tolerance,
                plan=plans[name],
            )
            for name in recorded.params
        }
    )
