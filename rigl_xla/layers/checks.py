"""Whether what a user hands over can be used, said before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rigl_xla.layers.weights import Weight, holders
from xla_replica import Replica


def check_flags(options: Any, *names: str) -> None:
    """Raises TypeError unless these options are True or False.

    A text like ``'no'`` counts as true in Python.
    """
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be True or False")


def check_number(name: str, value: object, allowed: str) -> None:
    """Raises TypeError, which says what is ``allowed``, unless it is a real number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number, {allowed}")


def check_types(model: object, replica: object) -> None:
    """Raises TypeError unless they are a model, and a replica or None."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch module")
    if not isinstance(replica, (Replica, type(None))):
        raise TypeError(
            f"replica is {replica!r}; it must be a xla_replica.Replica, such as "
            "xla_replica.current() gives, or None for that one"
        )


def check_steps(optimizer: Any, skip_step: bool) -> None:
    """Raises ValueError if steps are to be skipped that the optimizer counts on.

    A wrapper that decides by itself when it updates, because it must be called after
    every backward pass, has a true attribute ``steps_by_itself``.
    """
    if skip_step and getattr(optimizer, "steps_by_itself", False):
        raise ValueError(
            f"{type(optimizer).__name__} must be stepped after every backward pass and "
            "decides by itself when it updates, so a topology update cannot replace "
            "its step; build the pruner with skip_step=False"
        )


def check_devices(weights: Sequence[Weight]) -> None:
    """Raises ValueError unless all weights are on one device, and have values."""
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


def check_owner(weights: Sequence[Weight], optimizer: Any, pruner: object) -> None:
    """Raises unless the optimizer trains all the weights, and no other pruner does.

    Raises:
        ValueError, TypeError: As said.
    """
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
