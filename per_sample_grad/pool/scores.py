"""What a block of a pool scores: registries of scores and of labels.

A score is high where a sample would change the model much: loss; EL2N and GraNd (Paul
et al., arXiv:2107.07075); expected gradient length (Settles et al., NeurIPS 2007).

Bits must not depend on what was computed before. On a lazy device a result depends on
the program it is part of, so norms are separate programs, between two cuts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import xla_replica
from per_sample_grad.engine.capturing import Capture, capture
from per_sample_grad.pool.blocks import Given

Loss = Callable[[torch.Tensor, Any], torch.Tensor]
Forward = Callable[[nn.Module, Any], torch.Tensor]
# From a capture and its losses to numbers.
Answer = Callable[[Capture, torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class Scorer:
    """A model in evaluation mode, and what scores need; B is ``block_size``.

    Attributes:
        options: Those for `capture`; the others are arguments of `score_pool`.
        given: What the pool has for the block under way, if its labels are those to
            use.
    """

    model: nn.Module
    loss: Loss
    forward: Forward
    options: Mapping[str, Any]
    block_size: int
    given: Given | None = None

    def logits(self, inputs: Any) -> torch.Tensor:
        """Returns the logits, ``(B, *)``."""
        logits = self.forward(self.model, inputs)
        if not isinstance(logits, torch.Tensor):
            raise TypeError(
                f"the model gave a {type(logits).__name__} without .logits, not a "
                "tensor of logits; pass forward=, a function from model and inputs to "
                "logits"
            )
        return logits

    def losses(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Returns the losses, ``(B,)``; another shape is a ValueError."""
        logits, ignored = self.logits(inputs), _ignored_class(self.loss)
        if ignored is not None:
            self.check_classes(logits, ignored)
        losses = self.loss(logits, targets)
        if losses.shape != (self.block_size,):
            raise ValueError(
                f"loss= gave shape {tuple(losses.shape)} for {self.block_size} "
                'samples: give one number per sample, (B,), as by reduction="none"'
            )
        return losses

    def classes(self, inputs: Any, what: str) -> torch.Tensor:
        """Returns logits that ``what`` needs to be ``(B, C)``, without a graph."""
        with torch.no_grad():
            logits = self.logits(inputs)
        if logits.dim() != 2 or len(logits) != self.block_size:
            raise ValueError(
                f"{what} needs logits of shape (B, C), the model gave "
                f"{tuple(logits.shape)} for a block of {self.block_size} samples"
            )
        return logits

    def check_classes(self, logits: torch.Tensor, ignored: int | None = None) -> None:
        """Raises ValueError, with the sample, if a given label is not a class.

        Labels are looked at on the host: an accelerator would compute something.

        Args:
            logits: ``(B, C)``; with other dimensions nothing is checked.
            ignored: A label that is allowed too, as are floats ``(B, C)`` then: they
                are probabilities.
        """
        if self.given is None or logits.dim() != 2:
            return
        labels, num_classes = self.given.targets, logits.shape[1]
        kind, shape = getattr(labels, "dtype", None), getattr(labels, "shape", ())
        is_floating = kind is not None and kind.is_floating_point
        if ignored is not None and is_floating and shape == logits.shape:
            return
        if kind is None or is_floating or shape != (self.block_size,):
            raise ValueError(
                f"labels must be ({self.block_size},) classes as integers, got a "
                f"{type(labels).__name__} of {kind} {tuple(shape)} for {self.given}"
            )
        wrong = (labels < 0) | (labels >= num_classes)
        if ignored is not None:
            wrong &= labels != ignored
        for place in wrong.nonzero()[:1].flatten().tolist():
            others = "" if ignored is None else f", or {ignored} for none"
            raise ValueError(
                f"the label of sample {self.given.first + place} is {labels[place]}, "
                f"but the model has {num_classes} classes: 0 to {num_classes - 1} are "
                f"allowed{others}"
            )

    def grad_norms(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Returns ``‖∂loss_i / ∂parameters‖``, ``(B,)``."""
        return self.answers(inputs, targets, Capture.norms)

    def answers(self, inputs: Any, targets: Any, answer: Answer) -> torch.Tensor:
        """Returns what ``answer`` makes of a capture and its losses, ``(B,)``."""
        xla_replica.current().sync()
        with torch.enable_grad(), capture(self.model, **self.options) as recorded:
            losses = self.losses(inputs, targets)
        found = answer(recorded, losses)
        if recorded._comparison is not None:
            # The comparison is part of the program, on a lazy device in its very
            # midst: which block has one must not show.
            del recorded, losses, found
            others = {**self.options, "check": "never"}
            unchecked = dataclasses.replace(self, options=others)
            return unchecked.answers(inputs, targets, answer)
        xla_replica.current().sync()
        return found


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the default loss, of logits ``(B, C)`` and targets ``(B,)``."""
    if not targets.is_floating_point():
        targets = targets.long()
    return F.cross_entropy(logits, targets, reduction="none")


def _ignored_class(loss: Loss) -> int | None:
    """Returns which label a cross entropy of classes ignores; None: another loss."""
    if loss is cross_entropy:
        return -100
    if isinstance(loss, nn.CrossEntropyLoss):
        return loss.ignore_index
    if isinstance(loss, functools.partial) and loss.func is F.cross_entropy:
        return loss.keywords.get("ignore_index", -100)
    return None


def call_model(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Returns logits; the default ``forward`` of `score_pool`.

    Calls ``model(**dict)``, ``model(*tuple)`` or ``model(inputs)``; logits are what it
    returns, or its ``.logits`` or ``["logits"]``.
    """
    if isinstance(inputs, Mapping):
        out = model(**inputs)
    else:
        out = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    if isinstance(out, Mapping) and "logits" in out:
        return out["logits"]
    return getattr(out, "logits", out)


Values = Callable[[Scorer, Any, Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Score:
    """One score: a row of `SCORES`.

    Attributes:
        values: Maps a scorer, inputs and targets of a block to scores, ``(B,)``.
        of_parameters: Whether scores depend on which parameters are selected.
        labels: The labels that the score always has; None: the caller chooses.
        width: The shape of one sample's score: nothing, or that of a row.
    """

    values: Values
    of_parameters: bool = False
    labels: str | None = None
    width: tuple[int, ...] = ()


def loss(scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
    """Returns the losses, ``(B,)``."""
    with torch.no_grad():
        return scorer.losses(inputs, targets)


def el2n(scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
    """Returns ``‖softmax(logits) - onehot(target)‖``, ``(B,)``."""
    logits = scorer.classes(inputs, "el2n")
    scorer.check_classes(logits)
    with torch.no_grad():
        error = logits.float().softmax(1)
        classes = torch.arange(error.shape[1], device=error.device)
        return (error - (classes == targets.unsqueeze(1)).to(error.dtype)).norm(dim=1)


def of_gradients(answer: Answer, width: tuple[int, ...] = ()) -> Score:
    """Returns the score that is an answer about every sample's gradient.

    ``answer`` maps a capture and its losses to ``(B, *width)``, on their device.
    """

    def values(scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
        found: Any = scorer.answers(inputs, targets, answer)
        allowed = (scorer.block_size, *width)
        shape = getattr(found, "shape", None)
        if not isinstance(found, torch.Tensor) or shape != allowed:
            raise ValueError(
                f"score= returned a {type(found).__name__}"
                f"{'' if shape is None else f' of shape {tuple(shape)}'} for factors "
                f"of {allowed[0]} samples; return a tensor {allowed}, such as "
                "factors.norms(), or give a Projection of the selected parameters"
            )
        return found

    return Score(values, of_parameters=True, width=width)


SCORES: dict[str, Score] = {
    "grad_norm": Score(Scorer.grad_norms, of_parameters=True),
    # GraNd is the mean over several models.
    "grand": Score(Scorer.grad_norms, of_parameters=True),
    "egl": Score(Scorer.grad_norms, of_parameters=True, labels="expected"),
    "el2n": Score(el2n),
    "loss": Score(loss),
}


def given(values: Values, scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
    """Returns the scores for the pool's targets, which must exist."""
    if targets is None:
        raise ValueError(
            'labels="given", but the pool\'s batches have no targets; give pairs '
            '(inputs, targets), a dict with "labels", split=, or labels="pseudo" (or, '
            'to score it, "expected")'
        )
    return values(scorer, inputs, targets)


def pseudo(values: Values, scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
    """Returns the scores for the classes that the model finds most probable."""
    predicted = scorer.classes(inputs, 'labels="pseudo"').argmax(1)
    return values(scorer, inputs, predicted)


def expected(values: Values, scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
    """Returns ``Σ_c p_c score(c)`` by the model's probabilities, a pass per class."""
    chances = scorer.classes(inputs, 'labels="expected"').float().softmax(1)
    number = torch.zeros(len(chances), dtype=torch.long, device=chances.device)
    one, total = torch.ones_like(number), torch.zeros_like(chances[:, 0])
    for _ in range(chances.shape[1]):
        # One program for every class: even the first number is data.
        xla_replica.current().sync()
        chance = chances.gather(1, number.unsqueeze(1)).squeeze(1)
        total = total + chance * values(scorer, inputs, number).to(total.dtype)
        number = number + one
    return total


LABELS: dict[str, Callable[[Values, Scorer, Any, Any], torch.Tensor]] = {
    "given": given,
    "pseudo": pseudo,
    "expected": expected,
}
