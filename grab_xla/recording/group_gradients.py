"""The gradient of a fixed group of samples, out of any model's backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import xla_replica
from grab_xla.balancers import Ordering
from grab_xla.recording.arrivals import CopiedGradients, KeptGradients, arrivals
from grab_xla.recording.refusals import not_recorded, of_another_model
from xla_replica.common.arguments import check_choice

_NOTHING = contextlib.nullcontext()


class GroupGradients:
    """What ``fidelity="group"`` balances: what a backward pass adds to ``.grad``.

    It is taken from hooks, before it is added. So what other groups have left in
    ``.grad``, and sums over replicas in the same backward pass, do not matter. The
    hooks are there during the pass alone.

    Args:
        parameters: The parameters, by name.

    Attributes:
        balanced: Tensors of the shapes of what is balanced, by name.
    """

    projection = None

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.balanced = parameters
        self._started = False
        self._model: Callable[[], nn.Module | None] = lambda: None  # a weak reference
        # The dictionaries of modules that lead from the model to its parameters.
        self._path: list[tuple[Mapping[str, Any], str, Any]] = []
        self._parameters: list[nn.Parameter] = []
        self._kind = _kind([])
        self._handles: list[RemovableHandle] = []
        self._arrivals: KeptGradients | CopiedGradients = KeptGradients([])

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what makes a copy, which is not of what was found of a model."""
        return type(self), (self.balanced,)

    def start(
        self, model: nn.Module, options: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context that does nothing, and keeps the model's parameters.

        ``options`` are those of a capture, which a group does not need.

        Raises:
            ValueError: The model has no such parameter, or it is frozen.
        """
        del options
        if not self._is_known(model):
            self._find(model)
        self._started = True
        return _NOTHING

    def _is_known(self, model: nn.Module) -> bool:
        """Returns whether parameters are still those of this model, and trained."""
        if self._model() is not model:
            return False
        for held, name, value in self._path:
            if held.get(name) is not value:
                return False
        for parameter, handle in zip(self._parameters, self._handles):
            if not parameter.requires_grad or handle.hooks_dict_ref() is None:
                return False
        return self._kind == _kind(self._parameters)

    def _find(self, model: nn.Module) -> None:
        """Looks for the parameters in the model; see `start`."""
        self._model = lambda: None
        paths = {name: _path(model, name) for name in self.balanced}
        ends = {name: path[-1][2] for name, path in paths.items()}
        wrong = [
            name
            for name, found in ends.items()
            if found is None
            or not found.requires_grad
            or found.shape != self.balanced[name].shape
        ]
        if wrong:
            raise ValueError(
                f"record: {', '.join(wrong[:5])} are not trainable parameters of the "
                "model, of the same shapes; build the sampler with those of the model "
                "that is recorded"
            )
        # Parameters of a module share the way to it.
        self._path = list(
            {
                (id(step[0]), step[1]): step for path in paths.values() for step in path
            }.values()
        )
        self._parameters = list(ends.values())
        self._kind = _kind(self._parameters)
        self._arrivals = arrivals(self._parameters)
        self._handles = [p.register_hook(_nothing) for p in self._parameters]
        for handle in self._handles:
            handle.remove()
        self._model = weakref.ref(model)

    def backward(
        self,
        losses: Tensor,
        reduction: str = "mean",
        taker: Ordering | None = None,
        from_samples: bool = False,
    ) -> dict[str, Tensor] | Tensor:
        """Runs the backward pass of the mean loss, or of the sum.

        Returns:
            The gradient of that, ``(1, *shape)`` by name, or ``(1, columns)``.

        Raises:
            RuntimeError: `start` was not called for this forward pass, or the losses do
                not depend on the parameters.
            ValueError: ``reduction`` is not allowed.
        """
        del taker, from_samples  # There is one row, of the pass's own gradient.
        if not self._started:
            raise not_recorded()
        self._started = False
        found, handles = self._arrivals, self._handles
        found.begin()
        # A registered hook is an item of a dictionary: registering it anew takes ten
        # times as long.
        for handle, hook in zip(handles, found.hooks):
            handle.hooks_dict_ref()[handle.id] = hook
        try:
            add_gradient(losses, reduction)
        finally:
            for handle in handles:
                handle.remove()
        if not found.any_came():
            raise of_another_model()
        taken = found.take()
        if isinstance(taken, Tensor):
            return taken
        return dict(zip(self.balanced, taken))


def _path(model: nn.Module, name: str) -> list[tuple[Mapping[str, Any], str, Any]]:
    """Returns the way to the parameter that `named_parameters` gives this name.

    Every step is a dictionary, a key and the value, None if there is none.
    """
    *modules, last = name.split(".")
    found, module = [], model
    for each in modules:
        found.append((module._modules, each, module._modules.get(each)))
        module = found[-1][2]
        if module is None:
            return found
    return [*found, (module._parameters, last, module._parameters.get(last))]


def _kind(parameters: Sequence[Tensor]) -> tuple[torch.dtype, torch.device] | None:
    """Returns what a model that is converted or sent elsewhere changes in place."""
    return (parameters[0].dtype, parameters[0].device) if parameters else None


def _nothing(gradient: Tensor) -> None:
    """Holds a place among the hooks of a parameter."""


def add_gradient(losses: Tensor, reduction: str) -> None:
    """Adds the gradient of the mean loss, or of the sum, to ``.grad``.

    Raises:
        ValueError: ``reduction`` is not allowed.
    """
    check_choice("reduction", reduction, ("mean", "sum"))
    xla_replica.backward(losses.mean() if reduction == "mean" else losses.sum())
