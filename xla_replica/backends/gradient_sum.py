"""Gradients that stay allocated, and their sums over replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

AllReduce = Callable[[Sequence[torch.Tensor]], None]


class GradientSum:
    """The gradients of parameters on one replica, which `sum_` adds up over all.

    A backend may sum while the backward pass still computes gradients, and may keep
    several gradients in one tensor. Here they are summed one after another when `sum_`
    is called, which a lazy backend makes one program of.

    Args:
        all_reduce_: `Replica.all_reduce_`.
        may_begin: Asked once in every last backward pass: whether `hold` has been told
            of all parameters that require gradients now, and of no others.

    Attributes:
        gradients: What ``.grad`` of each parameter is, unless somebody replaces it.
        tensors: Tensors that hold all gradients, each number once: for what is done to
            every number, such as a division.
    """

    def __init__(self, all_reduce_: AllReduce, may_begin: Callable[[], bool]) -> None:
        self._all_reduce_ = all_reduce_
        self._may_begin = may_begin
        self.gradients: dict[nn.Parameter, torch.Tensor] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self.gradients.values())

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Holds the gradients of these parameters, and of no others, in ``.grad``.

        Those that were held before keep their values, new ones are zero. The same on
        every replica, between two sums.
        """
        self.gradients = {
            p: self.gradients[p] if p in self.gradients else torch.zeros_like(p)
            for p in parameters
        }
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient

    def expect(self, is_first: bool, is_last: bool) -> None:
        """Says where the next backward pass is among those before the next `sum_`.

        Args:
            is_first: It is the first. A ``.grad`` that is None or another tensor then
                becomes the one in `gradients` again, with what the pass computes.
            is_last: It is the last, so sums may begin while it runs. A replica without
                a backward pass before the next `sum_` calls `expect_none`.
        """

    def expect_none(self) -> None:
        """Makes all gradients zero: this replica adds nothing to the next `sum_`."""
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient  # somebody may have put another one there

    def has_begun(self, parameter: nn.Parameter) -> bool:
        """Returns whether the parameter's gradient is being summed already."""
        del parameter
        return False

    def sum_(self, *others: torch.Tensor, divisor: torch.Tensor | None = None) -> None:
        """Replaces gradients, and the other tensors, by their sums over replicas.

        Args:
            others: Small ones, of the same shapes and dtypes on every replica.
            divisor: ``(1,)``: what the summed gradients are divided by, if it is known.

        Raises:
            ValueError: A gradient was accumulated after its sum had begun.
        """
        self._all_reduce_([*self.tensors, *others])
        if divisor is not None:
            self.divide_(divisor)

    def divide_(self, divisor: torch.Tensor) -> None:
        """Divides gradients by a number, ``(1,)``.

        A multiplication by the reciprocal would round twice.
        """
        for tensor in self.tensors:
            # With a dimension it keeps its precision beside a narrower dtype.
            tensor.div_(divisor if tensor.dim() else divisor.reshape(()))

    def forget(self) -> None:
        """Ends a step: gradients are zero, or None until the next backward pass."""
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.zero_()
