"""How connections are scored: RigL and its relatives are two scores each.

A score is a function of a `Layer` that returns a tensor of the weight's shape; what
scores higher stays, or is grown. It must be the same on all replicas: weights, masks
and gradients are, and `Layer.random` is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from rigl_xla.topology import masks
from xla_replica.common.arguments import (
    check_choice,
    check_fields,
    check_function,
    checked,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """What a score can be made of: one layer at one topology update.

    Attributes:
        name: The parameter's name.
        weight: The parameter, detached; zero where inactive.
        mask: bool of the weight's shape, True where active.
        gradient: The dense gradient, averaged over replicas and the steps that the
            update collects, up to a positive factor; None where it is not used.
        step: Number of the step, from 1.
        update: Number of the topology update, from 1.
        seed: The seed of the run.
    """

    name: str
    weight: torch.Tensor
    mask: torch.Tensor
    gradient: torch.Tensor | None
    step: int
    update: int
    seed: int

    def random(self) -> torch.Tensor:
        """Returns uniform float32 numbers of the weight's shape, equal on replicas."""
        of = self.seed, self.name, self.update, self.weight.shape
        return masks.random_scores(*of).to(self.weight.device)


Score = Callable[[Layer], torch.Tensor]


def magnitude(layer: Layer) -> torch.Tensor:
    """Returns ``|w|``."""
    return layer.weight.abs()


def gradient(layer: Layer) -> torch.Tensor:
    """Returns the absolute value of the mean gradient."""
    assert layer.gradient is not None, "the method does not collect gradients"
    return layer.gradient.abs()


def sensitivity(layer: Layer) -> torch.Tensor:
    """Returns ``|w g|``: how much the loss depends on a connection."""
    assert layer.gradient is not None, "the method does not collect gradients"
    return (layer.weight * layer.gradient).abs()


SCORES: dict[str, Score] = {
    "magnitude": magnitude,
    "gradient": gradient,
    "sensitivity": sensitivity,
    "random": Layer.random,
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to change the topology. What training by it costs follows from the row.

    Attributes:
        drop: Scores active connections; the lowest are dropped.
        grow: Scores the others; the highest grow. None if nothing grows.
        collects: When dense gradients are needed: ``'never'``, ``'updates'`` (in the
            steps that `UpdateSchedule.collects`), or ``'always'`` (a running mean, up
            to the last update).
        updates: False for a topology that never changes.
        gradual: Whether it begins dense and loses connections at each update, so that
            nothing grows.

    Raises:
        TypeError, ValueError: An attribute is none of these.
    """

    drop: Score = magnitude
    grow: Score | None = gradient
    collects: str = checked("updates", among=("never", "updates", "always"))
    updates: bool = True
    gradual: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_function("drop", self.drop)
        if self.grow is not None:
            check_function("grow", self.grow)
            if self.gradual:
                raise ValueError(f"gradual=True needs grow=None, got {self.grow!r}")


STATIC = Method(grow=None, collects="never", updates=False)

# All that the packages know of a method; further rows may be added.
METHODS: dict[str, Method] = {
    "static": STATIC,
    # Mocanu et al. 2018, arXiv:1707.04780, Algorithm 2; counts are exact, and the
    # smallest weights of either sign go
    "set": Method(grow=Layer.random, collects="never"),
    # Evci et al. 2020, arXiv:1911.11134, Algorithm 1
    "rigl": Method(),
    # Dettmers and Zettlemoyer 2019, arXiv:1907.04840, without redistribution of
    # connections between layers, as in Evci et al.; `collects` begins at step 3
    "snfs": Method(collects="always"),
    # Zhu and Gupta 2017, arXiv:1710.01878
    "gmp": Method(grow=None, collects="never", gradual=True),
}


def method_named(
    name: str, drop: str | Score | None = None, grow: str | Score | None = None
) -> Method:
    """Returns the row of `METHODS`, with other scores if they are given.

    Dense gradients are then collected if a given score may look at them, as one that
    a user has written may.
    """
    method = METHODS[check_choice("method", name, METHODS)]
    scores: dict[str, Any] = {}
    for what, score in {"drop": drop, "grow": grow}.items():
        if score is None:
            continue
        if not method.updates or (what == "grow" and method.grow is None):
            raise ValueError(
                f"with method={name!r}, {what}= has nothing to do; leave it out"
            )
        if not callable(score):
            otherwise = "a function of a rigl_xla.Layer, to a tensor of its shape"
            score = SCORES[check_choice(what, score, SCORES, otherwise)]
        scores[what] = score
        if method.collects == "never" and score not in (magnitude, Layer.random):
            scores["collects"] = "updates"
    return dataclasses.replace(method, **scores)
