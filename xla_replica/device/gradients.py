"""Gradients that nothing else refers to when they are returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from xla_replica.device.device_traits import traits


def grad(
    outputs: torch.Tensor,
    inputs: Sequence[torch.Tensor | GradientEdge],
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Returns what ``torch.autograd.grad`` does, once its engine has released it.

    For a device that is not the CPU the engine has a thread, which keeps references to
    the gradients until it is scheduled again. A lazy device computes whatever is alive
    where a program is cut: a gradient that was dropped before the cut, but that this
    thread still kept, would now and then be one more result and so another program to
    compile. The thread runs one pass after the other, so when an empty pass has come
    back it has released the gradients of the pass before.

    Args:
        outputs: What is differentiated, on the device of the gradients.
        inputs: As for ``torch.autograd.grad``, like all further arguments.
    """
    gradients = torch.autograd.grad(outputs, inputs, *args, **options)
    if traits(outputs).is_lazy:
        with torch.enable_grad():
            end = outputs.detach().requires_grad_()
            start = _Nothing.apply(end)
        torch.autograd.grad(start, end, outputs.detach(), allow_unused=True)
    return gradients


class _Nothing(torch.autograd.Function):
    """A function without a gradient, whose backward pass leaves nothing to keep."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None
