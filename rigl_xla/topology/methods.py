"""How connections are scored: RigL and its relatives are two scores each.

A score is a function of a `Layer` that returns a tensor of the weight's shape; what
scores higher stays, or is grown. It must be the same on all replicas: weights, masks
and gradients are, and `Layer.random` is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from rigl_xla.topology import masks


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """What a score can be made of: one layer at one topology update.

    Attributes:
        name: Of the parameter.
        weight: Detached, zero where inactive.
        mask: bool, True where active.
        gradient: The dense gradient, of inactive connections too, averaged over
            replicas and over the steps that the update collects; up to a positive
            factor. None for methods that do not use it.
        step: Number of the step, from 1.
        update: Number of the topology update, from 1.
        seed: Of the run.
    """

    name: str
    weight: torch.Tensor
    mask: torch.Tensor
    gradient: torch.Tensor | None
    step: int
    update: int
    seed: int

    def random(self) -> torch.Tensor:
        """Uniform numbers of the weight's shape, alike on all replicas; float32."""
        numbers = masks.random_scores(
            self.seed, self.name, self.update, self.weight.numel()
        )
        return numbers.reshape(self.weight.shape).to(self.weight.device)


Score = Callable[[Layer], torch.Tensor]


def magnitude(layer: Layer) -> torch.Tensor:
    """``|w|``."""
    return layer.weight.abs()


def gradient(layer: Layer) -> torch.Tensor:
    """``|mean gradient|``: the mean first, then the absolute value."""
    assert layer.gradient is not None, "the method collects no gradient"
    return layer.gradient.abs()


def sensitivity(layer: Layer) -> torch.Tensor:
    """``|w g|``, as SNIP scores connections."""
    assert layer.gradient is not None, "the method collects no gradient"
    return (layer.weight * layer.gradient).abs()


def random(layer: Layer) -> torch.Tensor:
    """Uniform random numbers, from seed, name and number of the update."""
    return layer.random()


SCORES: dict[str, Score] = {
    "magnitude": magnitude,
    "gradient": gradient,
    "sensitivity": sensitivity,
    "random": random,
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to change the topology.

    Attributes:
        drop: Score of active connections.
        grow: Score of the others; None if nothing grows.
        collects: Dense gradients it needs: ``'never'``, ``'updates'`` (in the steps
            that `UpdateSchedule.collects`), or ``'always'`` (a running mean, up to the
            last update).
        updates: False for a topology that stays as it began.
        gradual: It begins dense and loses connections at each update.
    """

    drop: Score = magnitude
    grow: Score | None = gradient
    collects: str = "updates"
    updates: bool = True
    gradual: bool = False


METHODS: dict[str, Method] = {
    # Evci et al. 2020, arXiv:1911.11134, Algorithm 1
    "rigl": Method(),
    # Mocanu et al. 2018, arXiv:1707.04780, Algorithm 2; counts are exact, and the
    # smallest weights of either sign go
    "set": Method(grow=random, collects="never"),
    # Dettmers and Zettlemoyer 2019, arXiv:1907.04840, without redistribution of
    # connections between layers, as in Evci et al.; from step 3 on, see `collect`
    "snfs": Method(collects="always"),
    # Zhu and Gupta 2017, arXiv:1710.01878
    "gmp": Method(grow=None, collects="never", gradual=True),
    "static": Method(grow=None, collects="never", updates=False),
}


def method_named(
    name: str, drop: str | Score | None = None, grow: str | Score | None = None
) -> Method:
    """The method with other scores, if they are given.

    A score of one's own may look at the gradient, so dense gradients are then
    collected.

    Raises:
        ValueError, TypeError: A name is not known, or a score does not fit the method.
    """
    if not isinstance(name, str):
        raise TypeError(f"method is {name!r}; it must be one of {sorted(METHODS)}")
    if name not in METHODS:
        raise ValueError(
            f"method={name!r} is not known; allowed are {sorted(METHODS)}, with drop= "
            "and grow= for scores of your own"
        )
    method = METHODS[name]
    if not method.updates and (drop or grow):
        raise ValueError(
            f"method={name!r} never changes the topology, so drop= and grow= have "
            "nothing to do; leave them out or choose another method"
        )
    if grow is not None and method.grow is None:
        raise ValueError(f"method={name!r} grows no connections; leave out grow=")
    changes = {
        key: _score(key, value)
        for key, value in [("drop", drop), ("grow", grow)]
        if value is not None
    }
    method = dataclasses.replace(method, **changes)
    known = {magnitude, random, None}
    needs_none = method.drop in known and method.grow in known
    if not needs_none and method.collects == "never":
        method = dataclasses.replace(method, collects="updates")
    return method


def _score(what: str, value: str | Score) -> Score:
    if callable(value):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"{what} is {value!r}; it must be one of {sorted(SCORES)} or a function of "
            "a rigl_xla.Layer that returns a tensor of the weight's shape"
        )
    if value not in SCORES:
        raise ValueError(
            f"{what}={value!r} is not known; allowed are {sorted(SCORES)} or a function"
        )
    return SCORES[value]
