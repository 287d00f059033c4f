"""What one block of a pool scores: a registry of functions of model, inputs, targets.

A score is high where a sample would change the model much: loss; EL2N and GraNd (Paul
et al., arXiv:2107.07075); expected gradient length (Settles et al., NeurIPS 2007).

Bits must not depend on what was computed before. On a lazy device a result depends on
the program it is part of, so norms are programs of their own, between two cuts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from per_sample_grad.engine.backward_pass import Found
from per_sample_grad.engine.capturing import Capture, capture
from per_sample_grad.pool.feeding import Forward, checked_forward

Loss = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What scores are made of.

    Attributes:
        model: Evaluation mode.
        forward: From model and inputs to logits, ``(B, *)``.
        loss: From logits and targets to ``(B,)``.
        block_size: B.
        last_layer: Name of the module whose parameters a last-layer norm is of.
        autocast: Dtype of forward passes; None: as they are.
        device: Type of the device that computes.
        cut: Ends a program on a lazy device; nothing elsewhere.
        compiles: Whether the device is lazy.
        options: For `capture`.
    """

    model: nn.Module
    forward: Forward
    loss: Loss
    block_size: int
    last_layer: str | None
    autocast: torch.dtype | None
    device: str
    cut: Callable[[], None]
    compiles: bool
    options: dict[str, Any]

    def logits(self, inputs: Any) -> torch.Tensor:
        """``(B, *)``."""
        with self._autocast():
            return checked_forward(self.forward, self.model, inputs)

    def losses(self, inputs: Any, targets: Any) -> torch.Tensor:
        """``(B,)``, checked."""
        with self._autocast():
            logits = checked_forward(self.forward, self.model, inputs)
            losses = self.loss(logits, targets)
        if losses.shape != (self.block_size,):
            raise ValueError(
                f"loss= gave shape {tuple(losses.shape)} for a block of "
                f"{self.block_size} samples; give one number per sample, (B,), for "
                'instance with reduction="none"'
            )
        return losses

    def classes(self, inputs: Any, what: str) -> torch.Tensor:
        """Logits ``(B, C)``, or a ValueError that says what needs them."""
        with torch.no_grad():
            logits = self.logits(inputs)
        if logits.dim() != 2 or len(logits) != self.block_size:
            raise ValueError(
                f"{what} needs logits of shape (B, C), the model gave "
                f"{tuple(logits.shape)} for a block of {self.block_size} samples"
            )
        return logits

    def _autocast(self) -> torch.autocast:
        # One context per forward pass: what it caches would tie programs together.
        enabled = self.autocast is not None
        return torch.autocast(self.device, dtype=self.autocast, enabled=enabled)


Score = Callable[[Scoring, Any, Any], torch.Tensor]


def loss(scoring: Scoring, inputs: Any, targets: Any) -> torch.Tensor:
    """The loss: ``(B,)``."""
    with torch.no_grad():
        return scoring.losses(inputs, targets)


def el2n(scoring: Scoring, inputs: Any, targets: Any) -> torch.Tensor:
    """``‖softmax(logits) - onehot(target)‖``; logits ``(B, C)``, targets ``(B,)``."""
    logits = scoring.classes(inputs, "el2n")
    if (
        not isinstance(targets, torch.Tensor)
        or targets.dtype.is_floating_point
        or targets.shape != logits.shape[:1]
    ):
        found = getattr(targets, "dtype", ""), tuple(getattr(targets, "shape", ()))
        raise ValueError(
            f"el2n needs targets of shape ({len(logits)},), classes as integers; "
            f"received a {type(targets).__name__} of {found[0]} {found[1]}"
        )
    with torch.no_grad():
        error = logits.float().softmax(1)
        classes = torch.arange(error.shape[1], device=error.device)
        return (error - (classes == targets.unsqueeze(1)).to(error.dtype)).norm(dim=1)


def grad_norm(scoring: Scoring, inputs: Any, targets: Any) -> torch.Tensor:
    """``‖∂loss_i / ∂parameters‖``."""
    return _norms(scoring, inputs, targets, scoring.options)


def last_layer_grad_norm(scoring: Scoring, inputs: Any, targets: Any) -> torch.Tensor:
    """The same of one layer's parameters; the backward pass stops there."""
    assert scoring.last_layer is not None
    layer = scoring.model.get_submodule(scoring.last_layer)
    own = {id(param) for param in layer.parameters()}
    options = {**scoring.options, "params": lambda _, param: id(param) in own}
    return _norms(scoring, inputs, targets, options)


class _ComparedCapture(Capture):
    """Says whether it was compared with autograd."""

    compared = False

    def _run(self, *args: Any, **options: Any) -> Found:
        found = super()._run(*args, **options)
        self.compared = found.compared is not None
        return found


def _norms(
    scoring: Scoring, inputs: Any, targets: Any, options: dict[str, Any]
) -> torch.Tensor:
    """A program of its own, on a lazy device."""
    scoring.cut()
    recorded = _ComparedCapture(scoring.model, **options)
    norms = _recorded_norms(recorded, scoring, inputs, targets)
    if recorded.compared:
        # The comparison is part of the program, on a lazy device in its very midst:
        # which block has one must not show.
        del norms
        scoring.cut()
        recorded = _ComparedCapture(scoring.model, **{**options, "check": "never"})
        norms = _recorded_norms(recorded, scoring, inputs, targets)
    scoring.cut()
    return norms


def _recorded_norms(
    recorded: Capture, scoring: Scoring, inputs: Any, targets: Any
) -> torch.Tensor:
    with torch.enable_grad(), recorded:
        losses = scoring.losses(inputs, targets)
    return recorded.stream(losses, lambda found: found.norms(squared=True)).sqrt()


SCORES: dict[str, Score] = {
    "grad_norm": grad_norm,
    "grand": grad_norm,  # averaged over models
    "egl": grad_norm,  # averaged over labels
    "last_layer_grad_norm": last_layer_grad_norm,
    "el2n": el2n,
    "loss": loss,
}


def pseudo(scoring: Scoring, inputs: Any) -> torch.Tensor:
    """The classes that the model believes in: ``(B,)``."""
    return scoring.classes(inputs, 'labels="pseudo"').argmax(1)


def expected(score: Score, scoring: Scoring, inputs: Any) -> torch.Tensor:
    """``Σ_c p_c score(c)``, one pass per class."""
    chances = scoring.classes(inputs, 'labels="expected"').float().softmax(1)
    number = torch.zeros(len(chances), dtype=torch.long, device=chances.device)
    one, total = torch.ones_like(number), torch.zeros_like(chances[:, 0])
    for _ in range(chances.shape[1]):
        scoring.cut()  # one program for every class: even the first number is data
        chance = chances.gather(1, number.unsqueeze(1)).squeeze(1)
        total = total + chance * score(scoring, inputs, number).to(total.dtype)
        number = number + one
    return total


def last_called(scoring: Scoring, inputs: Any) -> str:
    """Name of the last module that the logits depend on, if every one has a rule."""
    with torch.enable_grad(), capture(scoring.model, **scoring.options) as recorded:
        logits = scoring.logits(inputs)
    found = recorded._assemble(logits.flatten(1).sum(1), retain_graph=False)
    if not found.uses or found.problems:
        unknown = ", ".join(found.problems) or "the model"
        raise ValueError(
            f"no rule accounts for {unknown}, so which layer is the last is not "
            "known; name the module with last_layer="
        )
    return found.uses[-1].name
