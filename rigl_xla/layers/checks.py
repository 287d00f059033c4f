"""Whether a pruner may keep weights sparse: before it touches any, and later."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from rigl_xla.layers.sparse_layer import SparseLayer, pruner_of
from rigl_xla.layers.weights import Weight
from xla_replica import is_sharded
from xla_replica.common.arguments import check_type


def check_hold(
    layers: Sequence[SparseLayer], optimizer: Any, skip_step: bool, pruner: object
) -> None:
    """Raises ValueError or TypeError unless ``pruner`` may keep the layers sparse.

    A wrapper that must be called after every backward pass, and decides when to update,
    has a true attribute ``steps_by_itself``.
    """
    allowed = "a torch optimizer, or a wrapper that is one"
    check_type("optimizer", optimizer, Optimizer, allowed)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = [x.name for x in layers if id(x.weight.parameter) not in owned]
    if _held(layers, pruner):
        gc.collect()  # one that nobody has any more, but that refers to itself
    held = _held(layers, pruner)
    names: dict[str, list[str]] = {}
    for layer in layers:
        names.setdefault(str(layer.data.device), []).append(layer.name)
    for is_wrong, why in (
        (skip_step and getattr(optimizer, "steps_by_itself", False),
         f"{type(optimizer).__name__} decides itself when to update, so that a "
         "topology update cannot replace it: build the pruner with skip_step=False"),
        (strangers,
         f"the optimizer does not train {strangers}, which are to be sparse: build it "
         "after the model was moved to its device, or put these into exclude="),
        (held,
         f"{held} are already kept sparse by another RigLScheduler: close() that one "
         "first (with skip_step=False its optimizer keeps it too)"),
        ("meta" in names or len(names) > 1,
         f"sparse weights must have their values on one device, got {names}: build the "
         "pruner later, or put others into exclude="),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(why)


def _held(layers: Sequence[SparseLayer], pruner: object) -> list[str]:
    """Returns names of the layers that another pruner keeps sparse."""
    holders = {x.name: pruner_of(x.weight.parameter) for x in layers}
    return [name for name, other in holders.items() if other not in (None, pruner)]


@functools.cache
def watch_optimizers() -> None:
    """Looks at the steps of all optimizers of this process, from now on.

    One hook for all pruners, never removed: a pruner may be collected as garbage while
    an optimizer runs its hooks.
    """
    register_optimizer_step_post_hook(_refuse_stranger)


def _refuse_stranger(optimizer: Optimizer, *_: object) -> None:
    """Raises RuntimeError if an optimizer has stepped the weights of another's."""
    for group in optimizer.param_groups:
        for pruner in filter(None, map(pruner_of, group["params"])):
            # A wrapper shares its state with the optimizer inside it.
            if optimizer.state is not pruner.optimizer.state:
                raise RuntimeError(
                    f"a {type(optimizer).__name__} that this pruner was not built with "
                    "has stepped sparse weights: close() the pruner and build it anew"
                )


def check_kind(weight: Weight) -> None:
    """Raises TypeError if a parameter, or its gradient, is of a kind not served."""
    module, parameter = weight.module, weight.parameter
    for is_wrong, why in (
        (is_sharded(parameter),
         "is a DTensor, sharded as by FSDP2; replicas must hold whole weights, as "
         "under DDP"),
        (parameter.is_complex(),
         f"is {parameter.dtype}; only real weights can be sparse"),
        (getattr(module, "sparse", False),
         f"has sparse gradients, because its {type(module).__name__} has sparse=True, "
         "and growth needs dense ones; build that with sparse=False"),
    ):  # fmt: skip
        if is_wrong:
            raise TypeError(f"{weight.name!r} {why}, or put it into exclude=")


def check_bound(layers: Sequence[SparseLayer]) -> None:
    """Raises ValueError if modules have other parameters by now than the pruner."""
    for weight in (layer.weight for layer in layers):
        if getattr(weight.module, weight.attribute, None) is not weight.parameter:
            raise ValueError(
                f"the model has other parameters now, such as {weight.name!r}, as "
                "after a move to XLA: build optimizer and pruner after the move"
            )
