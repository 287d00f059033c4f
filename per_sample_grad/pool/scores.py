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
    autocast: torch.dtype | None
    last_layer: str | None
    options: Mapping[str, Any]
    block_size: int
    given: Given | None = None

    def logits(self, inputs: Any) -> torch.Tensor:
        """Returns the logits, ``(B, *)``."""
        with self._autocast():
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
        with self._autocast():
            logits = self.logits(inputs)
            ignored = _ignored_class(self.loss)
            if ignored is not None:
                self.check_classes(logits, ignored, probabilities=True)
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

    def check_classes(
        self,
        logits: torch.Tensor,
        ignored: int | None = None,
        probabilities: bool = False,
    ) -> None:
        """Raises ValueError, with the sample, if a given label is not a class.

        Labels are looked at on the host: an accelerator would compute something.

        Args:
            logits: ``(B, C)``; with other dimensions nothing is checked.
            ignored: A label that is allowed too.
            probabilities: Whether floats ``(B, C)`` are allowed.
        """
        if self.given is None or logits.dim() != 2:
            return
        labels, num_classes = self.given.targets, logits.shape[1]
        kind, shape = getattr(labels, "dtype", None), getattr(labels, "shape", ())
        is_floating = kind is not None and kind.is_floating_point
        if probabilities and is_floating and shape == logits.shape:
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
            return self.with_options(check="never").answers(inputs, targets, answer)
        xla_replica.current().sync()
        return found

    def with_options(self, **options: Any) -> Scorer:
        """Returns a scorer whose captures have these options, too."""
        return dataclasses.replace(self, options={**self.options, **options})

    def find_last_layer(self, inputs: Any) -> str:
        """Returns ``last_layer``, by default the last module the logits depend on."""
        if self.last_layer is None:
            xla_replica.current().sync()
            with torch.enable_grad(), capture(self.model, **self.options) as recorded:
                losses = self.logits(inputs).flatten(1).sum(1)
            found = recorded._run(losses, lambda _: None, reported=True)
            last = found.modules[-1:]
            unknown = [*found.problems]
            unknown += [
                name for each in last if each.is_operation for name in each.names
            ]
            if unknown or not last:
                names = ", ".join(unknown) or "the model"
                raise ValueError(
                    f"no rule accounts for {names}: name the last layer with "
                    "last_layer="
                )
            self.last_layer = last[0].name
            xla_replica.current().sync()
        return self.last_layer

    def _autocast(self) -> torch.autocast:
        # One context per forward pass: what it caches would tie programs together.
        kind, enabled = xla_replica.current().device.type, self.autocast is not None
        return torch.autocast(kind, dtype=self.autocast, enabled=enabled)


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
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if isinstance(inputs, Mapping):
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
    scorer.check_classes(logits)
    with torch.no_grad():
        error = logits.float().softmax(1)
        classes = torch.arange(error.shape[1], device=error.device)
        return (error - (classes == targets.unsqueeze(1)).to(error.dtype)).norm(dim=1)


def last_layer_grad_norm(scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
    """Returns the norms for one layer's parameters; the backward pass stops there."""
    layer = scorer.model.get_submodule(scorer.find_last_layer(inputs))
    own = {id(param) for param in layer.parameters()}
    of_layer = scorer.with_options(params=lambda _, param: id(param) in own)
    return of_layer.grad_norms(inputs, targets)


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
