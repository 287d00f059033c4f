"""Gradients that nobody else holds when they are returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge


def grad(
    outputs: torch.Tensor,
    inputs: Sequence[torch.Tensor | GradientEdge],
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """``torch.autograd.grad``, and the engine has let go of what it returns.

    For a device that is not the CPU the engine has a thread of its own, which keeps the
    gradients until it is scheduled again. A lazy device computes whatever is alive
    where a program is cut: a gradient that was dropped before the cut, and that this
    thread still held, would now and then be one more result, and the program another
    one, to be compiled. The thread works off one pass after the other, so when an empty
    one has come back it has forgotten the one before.

    Args:
        outputs: What is differentiated, on the device of the gradients.
        inputs: As for ``torch.autograd.grad``, and so are the others.
    """
    gradients = torch.autograd.grad(outputs, inputs, *args, **options)
    if outputs.device.type == "xla":
        _empty_pass(outputs)
    return gradients


class _Nothing(torch.autograd.Function):
    """Has no gradient, so that its pass leaves nothing to be held."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


def _empty_pass(tensor: torch.Tensor) -> None:
    value = tensor.detach()
    with torch.enable_grad():
        end = value.requires_grad_()
        start = _Nothing.apply(end)
    torch.autograd.grad(start, end, value.detach(), allow_unused=True)
