"""Gradients that stay allocated, and their sums over replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from xla_replica.common.trees import Tensors
from xla_replica.device.gradients import AccumulationNote, weak_hook

if TYPE_CHECKING:
    from xla_replica.backends.replica import Replica

# Begins to sum a tensor over replicas, in place; returns what waits for it.
Begin = Callable[[torch.Tensor], Callable[[], None]]


class Pass(NamedTuple):
    """The next backward pass of a step.

    Attributes:
        is_first: It is the step's first. A ``.grad`` that is None or another tensor
            then becomes the one in `GradientSum.gradients` again, with what the pass
            computes.
        is_last: It is the last, so sums may begin while it runs. A replica without a
            backward pass before the next `GradientSum.sum_` then calls `use_zeros`.
        divisor: The number that `GradientSum.sum_` will be given, if it is known.
        counts: Its gradients count. Else they become zero: the pass is run for its
            collectives alone, where parameters are sharded.
    """

    is_first: bool
    is_last: bool
    divisor: int | None
    counts: bool


class GradientSum:
    """The gradients of parameters on one replica, which `sum_` adds up over all.

    A backend may sum while the backward pass still computes gradients, and may keep
    several gradients in one tensor. Here they are summed one after another when `sum_`
    is called, which a lazy backend makes one program of.

    Args:
        replica: The replica.
        may_begin: Asked once in every last backward pass: whether `hold` was given all
            parameters that require gradients now, and no others.

    Attributes:
        gradients: What ``.grad`` of each parameter is, unless somebody replaces it.
        has_new: Whether a gradient has appeared since `prepare_backward`; None if
            nobody has looked.
        tensors: Tensors that hold all gradients, each number once: for what is done to
            every number, such as a division.
    """

    has_new: bool | None = None

    def __init__(self, replica: Replica, may_begin: Callable[[], bool]) -> None:
        self.replica, self.may_begin = replica, may_begin
        self._is_lazy = replica.is_lazy
        self.gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._noted: set[nn.Parameter] = set()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self.gradients.values())

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Holds the gradients of these parameters, and of no others, in ``.grad``.

        New ones are what ``.grad`` holds now, or zero if that is None. Call it between
        two sums, with the same parameters on every replica.
        """
        for parameter in parameters:
            if parameter not in self.gradients and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        held = self.gradients
        self.gradients = {p: held.get(p, p.grad) for p in parameters}

    def note(self, parameter: nn.Parameter) -> None:
        """Takes note that a backward pass has added to ``parameter.grad``."""
        raise NotImplementedError

    def _note_in_passes(self, parameters: Iterable[nn.Parameter]) -> None:
        """Has `note` called with these parameters in every backward pass."""
        for parameter in parameters:
            if parameter not in self._noted:
                self._noted.add(parameter)
                AccumulationNote(weak_hook(self.note)).register_first(parameter)

    def prepare_backward(self, now: Pass) -> None:
        """Prepares for the next backward pass, one of those before the next `sum_`."""

    def order(self) -> list[int] | None:
        """Returns in which order gradients are summed; None if any will do."""
        return None

    def follow(self, order: list[int] | None) -> None:
        """Takes what `order` has returned on another replica; drops gradients."""

    def use_zeros(self) -> None:
        """Makes all gradients zero: this replica adds nothing to the next `sum_`."""
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient  # somebody may have put another one there

    def has_begun(self, parameter: nn.Parameter) -> bool:
        """Returns whether the parameter's gradient is being summed already."""
        return False

    def accumulates_elsewhere(self, parameter: nn.Parameter) -> bool:
        """Returns whether a gradient is accumulated elsewhere than in ``.grad``."""
        return False

    def sum_(self, others: Tensors, divisor: int | torch.Tensor | None) -> None:
        """Replaces gradients, and the other tensors, by their sums over replicas.

        Args:
            others: Small ones, of the same shapes and dtypes on every replica.
            divisor: What gradients, but not the others, are divided by, if anything:
                a number, or ``(1,)`` where the replica is lazy.

        Raises:
            ValueError: A gradient was accumulated after its sum had begun; or sharded
                gradients were not summed in the last backward pass.
        """
        if self.replica.num_replicas > 1:  # else the sums are there
            self.replica.all_reduce_([*self.tensors, *others])
        if divisor is not None:
            divide_(self.tensors, divisor)

    def sum_zeros(self, others: Tensors) -> None:
        """Sums ``others`` as `sum_` does, and zeros in place of the gradients."""
        tensors = self.tensors
        kept = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        self.sum_(others, None)
        for tensor, numbers in zip(tensors, kept):
            tensor.copy_(numbers)

    def divide_(self, divisor: int | torch.Tensor) -> None:
        """Divides gradients by a number, or by a tensor of one, ``(1,)``.

        A multiplication by the reciprocal would round twice.
        """
        divide_(self.tensors, divisor)

    def clip_(self, parameters: Tensors, max_norm: float) -> torch.Tensor:
        """Scales these parameters' gradients to a global norm of ``max_norm`` at most.

        Their order is that in which squares are added up. Returns the norm that they
        had, ``()``.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def clear(self) -> None:
        """Ends a step: gradients are zero, or None until the next backward pass."""
        tensors = self.tensors
        with torch.no_grad():
            if tensors and not self._is_lazy:
                torch._foreach_zero_(tensors)
                return
            for tensor in tensors:
                tensor.zero_()


def divide_(tensors: list[torch.Tensor], divisor: int | torch.Tensor) -> None:
    """Divides tensors, as `GradientSum.divide_` does gradients."""
    if tensors and isinstance(divisor, int):
        torch._foreach_div_(tensors, float(divisor))
        return
    for tensor in tensors:
        # With a dimension it keeps its precision beside a narrower dtype.
        tensor.div_(divisor if tensor.dim() else divisor.reshape(()))
