"""One call from a model and a batch to an answer, or to a report on how it is found.

The functions take what `per_sample_factors` takes, and compute the same factors. Those
that give one answer compute it as the backward pass goes, in the memory of training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from per_sample_grad.engine.capturing import Capture, capture
from per_sample_grad.factors.factors import Factors, check_vectors

LossFunction = Callable[..., torch.Tensor]


def per_sample_factors(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> Factors:
    """Returns the factors of every gradient, whose methods are the answers.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        **options: Options of `capture`.

    Raises:
        PerSampleError: The answer would be wrong; see `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    return recorded.backward(losses)


def per_sample_grads(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> dict[str, torch.Tensor]:
    """Returns every gradient, ``(B, *shape)`` by name; see `per_sample_factors`.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        **options: Options of `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    return recorded.materialize(losses)


def per_sample_grad_norms(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> torch.Tensor:
    """Returns ``‖g_i‖``, ``(B,)``; see `per_sample_factors`.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        **options: Options of `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    return recorded.norms(losses)


def per_sample_gram(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> torch.Tensor:
    """Returns ``⟨g_i, g_j⟩``, ``(B, B)``; see `per_sample_factors`.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        **options: Options of `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    return recorded.stream(losses, lambda f: f.gram())


def per_sample_grad_dot(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    vectors: Mapping[str, torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    """Returns ``⟨v, g_i⟩``, ``(B,)`` or ``(B, K)``; see `Factors.dot`.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        vectors: v by parameter name, ``(*shape)`` or ``(K, *shape)``.
        **options: Options of `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    shapes = {name: tuple(param.shape) for name, param in recorded.params.items()}
    check_vectors(vectors, shapes)
    return recorded.stream(
        losses, lambda f: f.dot({name: vectors[name] for name in f.shapes})
    )


def weighted_grad(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    weights: torch.Tensor,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Returns ``Σ_i w_i g_i`` by name; see `Factors.weighted_sum`.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        weights: w, ``(B,)``.
        **options: Options of `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    found = recorded.stream(losses, lambda f: f.weighted_sum(weights))
    return {name: found[name] for name in recorded.params}


def _recorded(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[Capture, torch.Tensor]:
    with capture(model, **options) as recorded:
        losses = loss_fn(model, *batch)
    return recorded, losses


@dataclasses.dataclass(frozen=True)
class ParameterCoverage:
    """What accounts for one parameter, and whether it is right.

    Attributes:
        uses: The calls that a rule accounts for, as ``"Linear 'head'"``.
        problems: Uses that no rule accounts for, and why.
        error: Relative difference from autograd's gradient of a randomly weighted sum
            of the losses; NaN where that is not finite.
        correct: Whether the error is within rounding.
    """

    uses: tuple[str, ...]
    problems: tuple[str, ...]
    error: float
    correct: bool


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
            state = "ok" if found.correct else "WRONG"
            state = "needs a fallback" if found.problems else state
            what = "; ".join((*found.uses, *found.problems)) or "not used by the losses"
            lines.append(f"{name:<{width}}  {state}  (error {found.error:.1e})  {what}")
        verdict = "complete" if self.complete else "NOT complete"
        return "\n".join([*lines, f"coverage is {verdict}"])


def coverage(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
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
    found = recorded._run(losses, lambda _: None, reported=True)
    assert found.compared is not None
    errors, tolerance = found.compared.errors, found.compared.tolerance
    parameters = {
        name: ParameterCoverage(
            uses=tuple(str(m) for m in found.modules if name in m.params.values()),
            problems=tuple(found.problems.get(name, ())),
            error=errors[name],
            correct=errors[name] <= tolerance,
        )
        for name in recorded.params
    }
    return Coverage(parameters)
