"""What one batch of a pool scores: a registry of functions of model, inputs, targets.

A score is high where a sample would change the model much: loss; EL2N and GraNd (Paul
et al., arXiv:2107.07075); expected gradient length (Settles et al., NeurIPS 2007).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import nn

from per_sample_grad.capture import Capture, capture

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What scores are made of.

    Attributes:
        model: From inputs to logits, ``(B, *)``; evaluation mode.
        loss: From logits and targets to ``(B,)``.
        last_layer: Name of the module whose parameters a last-layer norm is of.
        options: For `capture`.
    """

    model: nn.Module
    loss: Loss
    last_layer: str | None
    options: dict[str, object]


Score = Callable[[Scoring, torch.Tensor, torch.Tensor], torch.Tensor]


def loss(scoring: Scoring, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss: ``(B,)``."""
    with torch.no_grad():
        return _losses(scoring, inputs, targets)


def el2n(scoring: Scoring, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``‖softmax(logits) - onehot(target)‖``; logits ``(B, C)``, targets ``(B,)``."""
    with torch.no_grad():
        logits = scoring.model(inputs)
        require_classes(logits, "el2n")
        error = logits.float().softmax(1)
        classes = torch.arange(error.shape[1], device=error.device)
        return (error - (classes == targets.unsqueeze(1)).to(error.dtype)).norm(dim=1)


def grad_norm(
    scoring: Scoring, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """``‖∂loss_i / ∂parameters‖``."""
    return _norms(capture(scoring.model, **scoring.options), scoring, inputs, targets)


def last_layer_grad_norm(
    scoring: Scoring, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The same of one layer's parameters; the backward pass stops there."""
    model, layer = scoring.model, scoring.last_layer
    assert layer is not None
    own = {id(param) for param in model.get_submodule(layer).parameters()}
    options = {**scoring.options, "params": lambda _, param: id(param) in own}
    recorder = capture(model, **options)
    return _norms(recorder, scoring, inputs, targets)


def _norms(
    recorder: Capture, scoring: Scoring, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    with torch.enable_grad(), recorder:
        losses = _losses(scoring, inputs, targets)
    return recorder.backward(losses).norms()


def _losses(
    scoring: Scoring, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    losses = scoring.loss(scoring.model(inputs), targets)
    if losses.shape != (len(inputs),):
        raise ValueError(
            f"loss= gave shape {tuple(losses.shape)} for {len(inputs)} samples; give "
            'one number per sample, (B,), for instance with reduction="none"'
        )
    return losses


SCORES: dict[str, Score] = {
    "grad_norm": grad_norm,
    "grand": grad_norm,  # averaged over models
    "egl": grad_norm,  # averaged over labels
    "last_layer_grad_norm": last_layer_grad_norm,
    "el2n": el2n,
    "loss": loss,
}


def pseudo(scoring: Scoring, inputs: torch.Tensor) -> torch.Tensor:
    """The classes that the model believes in: ``(B,)``."""
    with torch.no_grad():
        logits = scoring.model(inputs)
    require_classes(logits, 'labels="pseudo"')
    return logits.argmax(1)


def expected(
    score: Score, scoring: Scoring, inputs: torch.Tensor, cut: Callable[[], None]
) -> torch.Tensor:
    """``Σ_c p_c score(c)``, one pass per class.

    Args:
        score: Of given targets.
        scoring: What it is made of.
        inputs: One batch.
        cut: Called between classes, so that a lazy graph holds one.
    """
    with torch.no_grad():
        logits = scoring.model(inputs)
    require_classes(logits, 'labels="expected"')
    chances = logits.float().softmax(1)
    total = torch.zeros_like(chances[:, 0])
    for targets, chance in _classes(chances):
        total = total + chance * score(scoring, inputs, targets).to(total.dtype)
        cut()
    return total


def _classes(chances: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Targets ``(B,)`` of every class and their probabilities, as device data."""
    number = torch.zeros(len(chances), dtype=torch.long, device=chances.device)
    one = torch.ones_like(number)
    for _ in range(chances.shape[1]):
        yield number, chances.gather(1, number.unsqueeze(1)).squeeze(1)
        number = number + one


def last_called(scoring: Scoring, inputs: torch.Tensor) -> str:
    """Name of the last module that the logits depend on, if every one has a rule."""
    with torch.enable_grad(), capture(scoring.model, **scoring.options) as recorder:
        logits = scoring.model(inputs)
    found = recorder.assemble(logits.flatten(1).sum(1), retain_graph=False)
    if not found.uses or found.problems:
        unknown = ", ".join(found.problems) or "the model"
        raise ValueError(
            f"no rule accounts for {unknown}, so which layer is the last is not "
            "known; name the module with last_layer="
        )
    return found.uses[-1].name


def require_classes(logits: torch.Tensor, what: str) -> None:
    """Raises ValueError unless there is one row of classes per sample."""
    if logits.dim() != 2:
        raise ValueError(
            f"{what} needs logits of shape (B, C), the model gave {tuple(logits.shape)}"
        )
