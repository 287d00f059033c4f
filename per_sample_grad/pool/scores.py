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

from per_sample_grad.engine.capturing import Capture, capture
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.projection import Projection
from per_sample_grad.pool.blocks import Given
from xla_replica import Replica
from xla_replica.common.arguments import check_type

Loss = Callable[[torch.Tensor, Any], torch.Tensor]
Forward = Callable[[nn.Module, Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Passes:
    """What passes over a block are: arguments of `score_pool`.

    ``options`` are those for `capture`.
    """

    loss: Loss
    forward: Forward
    autocast: torch.dtype | None
    options: dict[str, Any]
    last_layer: str | None = None

    def __post_init__(self) -> None:
        allowed = "a torch.dtype, such as torch.bfloat16, or None"
        check_type("autocast", self.autocast, torch.dtype | None, allowed)


@dataclasses.dataclass
class Scorer:
    """A model in evaluation mode, and what scores need; B is ``block_size``.

    Attributes:
        given: What the pool has for the block under way, if its labels are those to
            use.
    """

    model: nn.Module
    passes: Passes
    block_size: int
    replica: Replica
    given: Given | None = None

    def logits(self, inputs: Any) -> torch.Tensor:
        """Returns the logits, ``(B, *)``."""
        with self._autocast():
            logits = self.passes.forward(self.model, inputs)
        if not isinstance(logits, torch.Tensor):
            raise TypeError(
                f"the model gave a {type(logits).__name__} without .logits, not a "
                "tensor of logits; pass forward=, a function from model and inputs to "
                "logits"
            )
        return logits

    def losses(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Returns the losses, ``(B,)``; another shape is a ValueError."""
        with self._autocast():
            logits = self.logits(inputs)
            ignored = _ignored_class(self.passes.loss)
            if ignored is not None:
                self.check_classes(logits, ignored)
            losses = self.passes.loss(logits, targets)
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

    def check_classes(
        self,
        logits: torch.Tensor,
        ignored: int | None = None,
        what: str = "the loss",
        probabilities: bool = True,
    ) -> None:
        """Raises ValueError, with the sample, if a given label is not a class.

        Labels are looked at on the host: an accelerator would compute something.

        Args:
            logits: ``(B, C)``; with other dimensions nothing is checked.
            ignored: A label that is allowed too.
            what: What needs the classes, in the words of messages.
            probabilities: Whether floats ``(B, C)`` are allowed.
        """
        if self.given is None or logits.dim() != 2:
            return
        labels = self.given.targets
        kind, shape = getattr(labels, "dtype", None), getattr(labels, "shape", ())
        is_floating = kind is not None and kind.is_floating_point
        if probabilities and is_floating and shape == logits.shape:
            return
        if kind is None or is_floating or shape != (self.block_size,):
            raise ValueError(
                f"{what} needs ({self.block_size},) classes as integers, got a "
                f"{type(labels).__name__} of {kind} {tuple(shape)} for {self.given}"
            )
        classes = logits.shape[1]
        wrong = (labels < 0) | (labels >= classes)
        if ignored is not None:
            wrong &= labels != ignored
        if wrong.any():
            place = int(wrong.nonzero()[0])
            others = "" if ignored is None else f", or {ignored} for none"
            raise ValueError(
                f"the label of sample {self.given.first + place} is "
                f"{labels[place].item()}, but the model has {classes} classes: 0 to "
                f"{classes - 1} are allowed{others}"
            )

    def grad_norms(
        self, inputs: Any, targets: Any, options: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """Returns ``‖∂loss_i / ∂parameters‖``, ``(B,)``, with options for `capture`."""
        return self.answers(inputs, targets, Capture.norms, options)

    def answers(
        self,
        inputs: Any,
        targets: Any,
        answer: Callable[[Capture, torch.Tensor], torch.Tensor],
        options: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Returns what ``answer`` makes of a capture and its losses, ``(B,)``."""
        options = self.passes.options if options is None else options
        self.replica.sync()
        with torch.enable_grad(), capture(self.model, **options) as recorded:
            losses = self.losses(inputs, targets)
        found = answer(recorded, losses)
        if recorded._comparison is not None:
            # The comparison is part of the program, on a lazy device in its very
            # midst: which block has one must not show.
            del recorded, losses, found
            return self.answers(inputs, targets, answer, {**options, "check": "never"})
        self.replica.sync()
        return found

    def find_last_layer(self, inputs: Any) -> str:
        """Returns ``last_layer``, by default the last module the logits depend on."""
        if self.passes.last_layer is not None:
            return self.passes.last_layer
        self.replica.sync()
        with (
            torch.enable_grad(),
            capture(self.model, **self.passes.options) as recorded,
        ):
            logits = self.logits(inputs)
        losses = logits.flatten(1).sum(1)
        found = recorded._run(losses, lambda _: None, reported=True)
        last = found.modules[-1] if found.modules else None
        if last is None or last.is_operation or found.problems:
            names = last.params if last is not None and last.is_operation else ()
            unknown = ", ".join([*found.problems, *names]) or "the model"
            raise ValueError(
                f"no rule accounts for {unknown}: name the last layer with last_layer="
            )
        self.passes = dataclasses.replace(self.passes, last_layer=last.name)
        self.replica.sync()
        return last.name

    def _autocast(self) -> torch.autocast:
        # One context per forward pass: what it caches would tie programs together.
        enabled = self.passes.autocast is not None
        kind = self.replica.device.type
        return torch.autocast(kind, dtype=self.passes.autocast, enabled=enabled)


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

    Calls ``model(tensor)``, ``model(**dict)`` or ``model(*tuple)``; logits are what it
    returns, or its ``.logits`` or ``["logits"]``.
    """
    if isinstance(inputs, torch.Tensor):
        out = model(inputs)
    elif isinstance(inputs, Mapping):
        out = model(**inputs)
    elif isinstance(inputs, tuple | list):
        out = model(*inputs)
    else:
        raise TypeError(
            f"the inputs are a {type(inputs).__name__}; give a tensor, dict or tuple, "
            "or pass forward=, a function from model and inputs to logits"
        )
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
        takes_params: Whether the caller may select them with ``params=``.
        labels: The labels that the score always has; None: the caller chooses.
        width: The shape of one sample's score: nothing, or that of a row.
    """

    values: Values
    of_parameters: bool = False
    takes_params: bool = True
    labels: str | None = None
    width: tuple[int, ...] = ()


def loss(scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
    """Returns the losses, ``(B,)``."""
    with torch.no_grad():
        return scorer.losses(inputs, targets)


def el2n(scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
    """Returns ``‖softmax(logits) - onehot(target)‖``, ``(B,)``."""
    logits = scorer.classes(inputs, "el2n")
    scorer.check_classes(logits, what="el2n", probabilities=False)
    with torch.no_grad():
        error = logits.float().softmax(1)
        classes = torch.arange(error.shape[1], device=error.device)
        return (error - (classes == targets.unsqueeze(1)).to(error.dtype)).norm(dim=1)


def last_layer_grad_norm(scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
    """Returns the norms for one layer's parameters; the backward pass stops there."""
    layer = scorer.model.get_submodule(scorer.find_last_layer(inputs))
    own = {id(param) for param in layer.parameters()}
    options = {**scorer.passes.options, "params": lambda _, param: id(param) in own}
    return scorer.grad_norms(inputs, targets, options)


def of_factors(function: Callable[[Factors], torch.Tensor]) -> Score:
    """Returns the score that a function of every sample's gradient makes.

    ``function`` maps the `Factors` of a block to numbers, ``(B,)``, on their device.
    """

    def answer(recorded: Capture, losses: torch.Tensor) -> torch.Tensor:
        factors = recorded.backward(losses)
        with torch.no_grad():
            found = function(factors)
        shape = getattr(found, "shape", None)
        if not isinstance(found, torch.Tensor) or shape != losses.shape:
            raise ValueError(
                f"score= returned a {type(found).__name__}"
                f"{'' if shape is None else f' of shape {tuple(shape)}'} for factors "
                f"of {len(losses)} samples; return a tensor of one number per sample, "
                "(B,), such as factors.norms()"
            )
        return found

    def values(scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
        return scorer.answers(inputs, targets, answer)

    return Score(values, of_parameters=True)


def of_projection(projection: Projection) -> Score:
    """Returns the score that is the projection of every sample's gradient, a row."""

    def answer(recorded: Capture, losses: torch.Tensor) -> torch.Tensor:
        found = recorded.project(losses, projection)
        if found.shape[1] != projection.size:
            raise ValueError(
                "score= is a projection of parameters that are not selected by params="
            )
        return found

    def values(scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
        return scorer.answers(inputs, targets, answer)

    return Score(values, of_parameters=True, width=(projection.size,))


SCORES: dict[str, Score] = {
    "grad_norm": Score(Scorer.grad_norms, of_parameters=True),
    # GraNd is the mean over several models.
    "grand": Score(Scorer.grad_norms, of_parameters=True),
    "egl": Score(Scorer.grad_norms, of_parameters=True, labels="expected"),
    "last_layer_grad_norm": Score(
        last_layer_grad_norm, of_parameters=True, takes_params=False
    ),
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
    del targets
    predicted = scorer.classes(inputs, 'labels="pseudo"').argmax(1)
    return values(scorer, inputs, predicted)


def expected(values: Values, scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
    """Returns ``Σ_c p_c score(c)`` by the model's probabilities, a pass per class."""
    del targets
    chances = scorer.classes(inputs, 'labels="expected"').float().softmax(1)
    number = torch.zeros(len(chances), dtype=torch.long, device=chances.device)
    one, total = torch.ones_like(number), torch.zeros_like(chances[:, 0])
    for _ in range(chances.shape[1]):
        # One program for every class: even the first number is data.
        scorer.replica.sync()
        chance = chances.gather(1, number.unsqueeze(1)).squeeze(1)
        total = total + chance * values(scorer, inputs, number).to(total.dtype)
        number = number + one
    return total


LABELS: dict[str, Callable[[Values, Scorer, Any, Any], torch.Tensor]] = {
    "given": given,
    "pseudo": pseudo,
    "expected": expected,
}
