"""Gradients that nothing else refers to when they are returned."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from xla_replica.common.trees import Tensors
from xla_replica.device.device_traits import traits


class AccumulationHook(functools.partial[torch.Tensor | None]):
    """A hook that changes what is added to a parameter's ``.grad``, but not `grad`.

    For ``parameter.register_hook``: what `grad` returns is the derivative of its
    outputs, whatever is done to the gradients that the optimizer uses.

    Args:
        function: From a gradient to the one that is added; as for ``register_hook``.
    """

    _paused = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return None if self._paused else super().__call__(*args, **kwargs)

    @staticmethod
    def all_on(tensor: torch.Tensor) -> bool:
        """Returns whether every gradient hook of a tensor is such a hook."""
        hooks = tensor._backward_hooks or {}
        return all(isinstance(hook, AccumulationHook) for hook in hooks.values())

    @staticmethod
    @contextlib.contextmanager
    def paused(
        tensors: torch.Tensor | Sequence[torch.Tensor | GradientEdge],
    ) -> Iterator[None]:
        """Returns a context in which such hooks of these tensors do nothing."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        of_each = [getattr(tensor, "_backward_hooks", None) or {} for tensor in tensors]
        hooks = [hook for each in of_each for hook in each.values()]
        found = [hook for hook in hooks if isinstance(hook, AccumulationHook)]
        # Set on the hook and not in this thread: another one may run it.
        for hook in found:
            hook._paused = True
        try:
            yield
        finally:
            for hook in found:
                hook._paused = False


class AccumulationNote(functools.partial[None]):
    """A hook that notes that ``.grad`` has grown, and does not look at its numbers.

    For ``parameter.register_post_accumulate_grad_hook``. What sums gradients over
    replicas may have divided them already where all hooks are such ones.

    Args:
        function: Is given the parameter.
    """

    def register_first(self, parameter: torch.Tensor) -> None:
        """Registers the hook to run before all that are registered now."""
        parameter.register_post_accumulate_grad_hook(self)
        hooks = parameter._post_accumulate_grad_hooks
        for key in list(hooks)[:-1]:  # they run in the order of insertion
            hooks[key] = hooks.pop(key)

    @staticmethod
    def all_on(parameter: torch.Tensor) -> bool:
        """Returns whether every such hook of a parameter is a note."""
        hooks = parameter._post_accumulate_grad_hooks or {}
        return all(isinstance(hook, AccumulationNote) for hook in hooks.values())


def weak_hook(method: Any, *arguments: Any) -> Callable[..., Any]:
    """Returns a hook that calls a method, and does not keep its object alive.

    The method is given the arguments, and then what the hook is given. Once the object
    is gone, the hook does nothing.
    """
    owner, function = weakref.ref(method.__self__), method.__func__

    def hook(*given: Any) -> Any:
        living = owner()
        return None if living is None else function(living, *arguments, *given)

    return hook


def accumulation_hook(
    parameter: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]
) -> Any:
    """Runs ``hook`` before a gradient is accumulated; returns the node, to be kept.

    It is on the node and not on the tensor: `torch.autograd.grad` does not run it, and
    it runs after the hooks of the tensor. A parameter does not keep its node.

    Args:
        parameter: A tensor that requires a gradient.
        hook: From the gradient to None, or to the one that is accumulated.
    """

    def before(gradients: Sequence[torch.Tensor | None]) -> Any:
        changed = None if gradients[0] is None else hook(gradients[0])
        return None if changed is None else (changed,)

    node = torch.autograd.graph.get_gradient_edge(parameter).node
    node.register_prehook(before)
    return node


def grad(
    outputs: torch.Tensor,
    inputs: Tensors | Sequence[GradientEdge],
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Returns what ``torch.autograd.grad`` does, once its engine has released it.

    An `AccumulationHook` does not run.

    For a device that is not the CPU the engine has a thread, which keeps references to
    the gradients until it is scheduled again. A lazy device computes whatever is alive
    where a program is cut: a gradient that was dropped before the cut, but that this
    thread still kept, would now and then be one more result and so another program to
    compile. The thread runs one pass after the other, so when an empty pass has come
    back it has released the gradients of the pass before.

    Args:
        outputs: What is differentiated, on the device of the gradients.
        inputs: What it is differentiated by, as for ``torch.autograd.grad``.
        *args: Its further arguments.
        **options: Its further arguments by name.
    """
    with AccumulationHook.paused(inputs):
        gradients = torch.autograd.grad(outputs, inputs, *args, **options)
    if traits(outputs).is_lazy:
        _release(outputs)
    return gradients


def backward(output: torch.Tensor, *, retain_graph: bool = False) -> None:
    """Does what ``output.backward()`` does, once its engine has released gradients.

    `grad` says why. An `AccumulationHook` runs.

    Args:
        output: A scalar.
        retain_graph: Whether it is differentiated once more.
    """
    output.backward(retain_graph=retain_graph)
    if traits(output).is_lazy:
        _release(output)


def add_gradients(parameters: Tensors, gradients: Tensors) -> None:
    """Adds gradients to ``.grad`` as the end of a backward pass does, hooks included.

    Args:
        parameters: Leaves that require grad, at least one.
        gradients: Of the same shapes and dtypes.
    """
    torch.autograd.backward(parameters, gradients)
    if traits(parameters[0]).is_lazy:
        _release(parameters[0])


def _release(outputs: torch.Tensor) -> None:
    """Makes the engine's thread for a lazy device come back from an empty pass."""
    with torch.enable_grad():
        end = outputs.detach().requires_grad_()
        start = _Nothing.apply(end)
    torch.autograd.grad(start, end, outputs.detach(), allow_unused=True)


class _Nothing(torch.autograd.Function):
    """A function without a gradient, whose backward pass leaves nothing to keep."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None
