"""When to compare the factors with autograd: once for every structure of a model."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Collection, Hashable, Sequence
from typing import Literal

import torch
from torch import nn

from per_sample_grad.engine.comparison import Comparison
from per_sample_grad.engine.graph import Reached
from per_sample_grad.engine.recording import RecordedCall

Check = Literal["first", "always", "never"]
CHECKS: tuple[Check, ...] = ("first", "always", "never")


@dataclasses.dataclass(frozen=True)
class Proof:
    """What earlier comparisons found for one structure of one model.

    Attributes:
        silent: Parameters about which nothing was learnt yet.
        wrong: Parameters whose rules were wrong, so that a fallback replaced them.
        whole: The size of the whole gradient.
    """

    silent: frozenset[str]
    wrong: frozenset[str] = frozenset()
    whole: float = 0.0


@dataclasses.dataclass(frozen=True)
class Due:
    """What is to be compared in a capture, and when.

    Attributes:
        names: The names of the parameters.
        at_once: Compare each factor as soon as it is there, so that it can be freed;
            else after the pass, and only if any gradient arrived.
        whole: The size of the whole gradient, where not all of it is compared.
    """

    names: frozenset[str]
    at_once: bool = True
    whole: float = 0.0


_PROVEN: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Proof]]
_PROVEN = weakref.WeakKeyDictionary()


def signature(
    losses: torch.Tensor,
    calls: Sequence[RecordedCall],
    names: Collection[str],
    reached: Reached,
) -> Hashable:
    """Returns what must be equal for one proof to hold for two captures.

    That is the modules that were called, their shapes, and the operations outside of
    them, those of the loss among them.
    """
    called = tuple(
        (
            recorded.owner.name,
            recorded.owner.rule,
            recorded.call.batch_dim,
            recorded.shape,
            recorded.call.module.training,
        )
        for recorded in calls
    )
    return (
        called,
        losses.shape,
        losses.dtype,
        losses.device,
        tuple(names),
        *(reached.outside.items()),
        reached.structure,
    )


def proof_of(model: nn.Module, key: Hashable) -> Proof | None:
    """Returns what earlier comparisons of this structure found; None without one."""
    return _PROVEN.get(model, {}).get(key)


def due(
    check: Check,
    proof: Proof | None,
    names: Collection[str],
    *,
    has_fallback: bool,
    reordered: bool,
) -> Due:
    """Returns what this capture has to compare.

    A parameter whose gradient was zero proves nothing: it is compared again as soon as
    it has a gradient. Where samples are taken in an order that is data, a proof says
    nothing about another order.
    """
    if check == "never":
        return Due(frozenset())
    known = proof is not None and (has_fallback or not proof.wrong)
    if check == "always" or proof is None or not known or reordered:
        return Due(frozenset(names))
    return Due(proof.silent, at_once=False, whole=proof.whole)


def remember(
    model: nn.Module, key: Hashable, found: Comparison, wrong: Collection[str]
) -> None:
    """Keeps what a comparison proved, so that it is not repeated."""
    if not any(math.isnan(error) for error in found.errors.values()):
        proven = _PROVEN.setdefault(model, {})
        before = proven.get(key, Proof(found.silent))
        proven[key] = Proof(
            found.silent & before.silent,
            before.wrong | frozenset(wrong),
            max(found.whole, before.whole),
        )
