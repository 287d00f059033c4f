"""When the factors are compared with autograd: once for every structure of a model."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from per_sample_grad.engine.comparison import Comparison

if TYPE_CHECKING:
    from per_sample_grad.engine.graph import Reached
    from per_sample_grad.engine.recording import Use

Check = Literal["first", "always", "never"]
CHECKS: tuple[Check, ...] = ("first", "always", "never")


@dataclasses.dataclass(frozen=True)
class Proof:
    """What is known of one structure of one model.

    Attributes:
        silent: Parameters of which nothing was learnt yet.
        wrong: Those whose rules were wrong here, and a fallback took their place.
        whole: The size of the whole gradient.
    """

    silent: frozenset[str]
    wrong: frozenset[str] = frozenset()
    whole: float = 0.0


@dataclasses.dataclass(frozen=True)
class Due:
    """What is to be compared in a capture, and when.

    Attributes:
        names: Of the parameters.
        at_once: Before the factors are there, so that each can go at once; else after,
            and only if any gradient arrived.
        whole: The size of the whole gradient, where not all of it is compared.
    """

    names: frozenset[str]
    at_once: bool = True
    whole: float = 0.0


_PROVEN: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Proof]]
_PROVEN = weakref.WeakKeyDictionary()


def signature(
    losses: torch.Tensor, uses: Sequence[Use], names: Collection[str], reached: Reached
) -> Hashable:
    """What must be alike for one proof to hold for two captures.

    The modules that were called, their shapes, and the operations outside of them,
    the loss among them.
    """
    calls = tuple(
        (
            use.name,
            use.rule,
            use.call.batch_dim,
            use.shape,
            use.call.module.training,
        )
        for use in uses
    )
    return (
        calls,
        losses.shape,
        losses.dtype,
        losses.device,
        tuple(names),
        *(reached.outside.items()),
        reached.structure,
    )


def proof_of(model: nn.Module, key: Hashable) -> Proof | None:
    """What earlier comparisons of this structure found; None without one."""
    return _PROVEN.get(model, {}).get(key)


def due(
    check: Check,
    proof: Proof | None,
    names: Collection[str],
    *,
    has_fallback: bool,
    reordered: bool,
) -> Due:
    """What this capture has to compare.

    A parameter whose gradient was zero proves nothing: it is compared again, as soon
    as there is any. And where samples are taken in an order that is data, a proof says
    nothing of another order.
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
    """The comparison need not be repeated, unless it said nothing of a parameter."""
    if not any(math.isnan(error) for error in found.errors.values()):
        proven = _PROVEN.setdefault(model, {})
        before = proven.get(key, Proof(found.silent))
        proven[key] = Proof(
            found.silent & before.silent,
            before.wrong | frozenset(wrong),
            max(found.whole, before.whole),
        )
