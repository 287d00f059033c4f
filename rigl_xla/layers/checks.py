"""Checks whether a pruner may take hold of weights, before it touches anything."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from rigl_xla.layers.weights import Weight

# Parameter to the pruner that keeps it sparse: not an attribute, which torch.save would
# pickle.
holders: MutableMapping[nn.Parameter, weakref.ref[Any]] = WeakIdKeyDictionary()


def check_hold(
    weights: Sequence[Weight], optimizer: Any, skip_step: bool, pruner: object
) -> None:
    """Raises ValueError or TypeError unless ``pruner`` may take hold of the weights.

    A wrapper that must be called after every backward pass, and decides when to update,
    has a true attribute ``steps_by_itself``.
    """
    if skip_step and getattr(optimizer, "steps_by_itself", False):
        raise ValueError(
            f"{type(optimizer).__name__} must be stepped after every backward pass and "
            "decides when to update, so a topology update cannot replace its step; "
            "build the pruner with skip_step=False"
        )

    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch optimizer, "
            "or a wrapper that is one"
        )
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = [w.name for w in weights if id(w.parameter) not in owned]
    if strangers:
        raise ValueError(
            f"the optimizer does not train {strangers}, which are to be sparse; build "
            "it from this model's parameters, after the model was moved to its "
            "device, or put these into exclude="
        )
    for weight in weights:
        holder = holders.get(weight.parameter)
        if holder is not None and holder() not in (None, pruner):
            raise ValueError(
                f"{weight.name!r} is already kept sparse by another RigLScheduler: "
                "close() that one first"
            )
    names: dict[str, list[str]] = {}
    for weight in weights:
        names.setdefault(str(weight.parameter.device), []).append(weight.name)
    if "meta" in names:
        raise ValueError(
            f"{names['meta']} are on the meta device and have no values yet; build the "
            "pruner after the model has its weights"
        )
    if len(names) > 1:
        raise ValueError(
            f"weights to be sparse are on several devices, {names}; an update chooses "
            "for all of them at once, on one. Put those of the others into exclude="
        )


def check_bound(weights: Iterable[Weight]) -> None:
    """Raises ValueError if the modules have other parameters now than the pruner."""
    replaced = [weight.name for weight in weights if weight.is_replaced]
    if replaced:
        raise ValueError(
            f"the model has other parameters now than when this pruner was built: "
            f"{replaced[0]!r} and {len(replaced) - 1} more. Moving a model to XLA "
            "does that; build optimizer and pruner after the move"
        )
