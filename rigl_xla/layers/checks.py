"""Who keeps which weight sparse, and whether a pruner may, before it touches any."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from rigl_xla.layers.weights import Weight
from xla_replica import is_sharded
from xla_replica.common.arguments import check_type


class Hold:
    """The hooks of one pruner on one parameter; keeps neither of the two alive.

    They work until they are released, also when nobody has the pruner any more: the
    parameter then stays sparse, by its last mask, until another pruner has a hold on
    it, which releases this one.
    """

    def __init__(
        self, parameter: nn.Parameter, pruner: object, handles: Iterable[Any]
    ) -> None:
        self.pruner = weakref.ref(pruner)
        self._handles = handles
        self.released = False
        before = _holds.get(parameter)
        if before is not None:
            before.release()
        _holds[parameter] = self

    def release(self) -> None:
        """Removes the hooks."""
        self.released = True
        for handle in self._handles:
            handle.remove()


# By parameter; not an attribute of it, which torch.save would pickle.
_holds: MutableMapping[Tensor, Hold] = WeakIdKeyDictionary()


def pruner_of(parameter: Tensor) -> object | None:
    """Returns the pruner that keeps a parameter sparse, if anybody has it."""
    hold = _holds.get(parameter)
    return None if hold is None or hold.released else hold.pruner()


def check_hold(
    weights: Sequence[Weight], optimizer: Any, skip_step: bool, pruner: object
) -> None:
    """Raises ValueError or TypeError unless ``pruner`` may keep the weights sparse.

    A wrapper that must be called after every backward pass, and decides when to update,
    has a true attribute ``steps_by_itself``.
    """
    if skip_step and getattr(optimizer, "steps_by_itself", False):
        raise ValueError(
            f"{type(optimizer).__name__} decides itself when to update, so that a "
            "topology update cannot replace it: build the pruner with skip_step=False"
        )
    allowed = "a torch optimizer, or a wrapper that is one"
    check_type("optimizer", optimizer, Optimizer, allowed)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = [w.name for w in weights if id(w.parameter) not in owned]
    if strangers:
        raise ValueError(
            f"the optimizer does not train {strangers}, which are to be sparse: build "
            "it after the model was moved to its device, or put these into exclude="
        )
    if _held(weights, pruner):
        gc.collect()  # one that nobody has any more, but that refers to itself
    for name in _held(weights, pruner):
        raise ValueError(
            f"{name!r} is already kept sparse by another RigLScheduler: close() that "
            "one first (with skip_step=False its optimizer keeps it too)"
        )
    names: dict[str, list[str]] = {}
    for weight in weights:
        names.setdefault(str(weight.parameter.device), []).append(weight.name)
    if "meta" in names or len(names) > 1:
        raise ValueError(
            f"sparse weights must have their values on one device, got {names}: build "
            "the pruner later, or put others into exclude="
        )


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
        for parameter in group["params"]:
            pruner: Any = pruner_of(parameter)
            # A wrapper shares its state with the optimizer inside it.
            if pruner is not None and optimizer.state is not pruner.optimizer.state:
                raise RuntimeError(
                    f"a {type(optimizer).__name__} that this pruner was not built with "
                    "has stepped sparse weights: if it trains the model, close() this "
                    "pruner and build one with it and state_dict=pruner.state_dict()"
                )


def _held(weights: Sequence[Weight], pruner: object) -> list[str]:
    """Returns names of the weights that another pruner keeps sparse."""
    return [w.name for w in weights if pruner_of(w.parameter) not in (None, pruner)]


def check_kind(weight: Weight) -> None:
    """Raises TypeError if a parameter, or its gradient, is of a kind not served."""
    module, parameter = weight.module, weight.parameter
    reason = ""
    if is_sharded(parameter):
        reason = (
            "is a DTensor, sharded as by FSDP2; replicas must hold whole weights, as "
            "under DDP"
        )
    elif parameter.is_complex():
        reason = f"is {parameter.dtype}; only real weights can be sparse"
    elif getattr(module, "sparse", False):
        reason = (
            f"has sparse gradients, because its {type(module).__name__} has "
            "sparse=True, and growth needs dense ones; build that with sparse=False"
        )
    if reason:
        raise TypeError(f"{weight.name!r} {reason}, or put it into exclude=")


def check_bound(weights: Iterable[Weight]) -> None:
    """Raises ValueError if modules have other parameters by now than the pruner."""
    replaced = [
        weight.name
        for weight in weights
        if getattr(weight.module, weight.attribute, None) is not weight.parameter
    ]
    if replaced:
        raise ValueError(
            f"the model has other parameters now, such as {replaced[0]!r}, as after a "
            "move to XLA: build optimizer and pruner after the move"
        )
