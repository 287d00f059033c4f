"""Gradients that stay allocated: accumulated, summed over replicas, zeroed in place.

Kept tensors make one graph of every minibatch and one of every update: a gradient that
is None at first and a tensor later would trace two of each, and a replica without
gradients would bring an empty list to the collective.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from xla_replica import Replica


class GradientBuffers:
    """The ``.grad`` of every trainable parameter, allocated once.

    Args:
        replica: The replica whose gradients these are.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}

    def refresh(
        self, parameters: Iterable[nn.Parameter], behind_backward: bool = False
    ) -> bool:
        """Follows ``requires_grad``: allocates the unfrozen, drops the frozen.

        Must find the same on every replica; cheap when nothing has changed.

        Args:
            parameters: All there are.
            behind_backward: Whether a minibatch's gradients stand in ``.grad``. Then a
                new parameter's gradient is of that minibatch, else of none that counts.

        Returns:
            Whether something has.
        """
        changed = False
        for parameter in parameters:
            if parameter.requires_grad == (parameter in self._gradients):
                continue
            changed = True
            if parameter.requires_grad:
                if parameter.grad is None or not behind_backward:
                    parameter.grad = torch.zeros_like(parameter)
                self._gradients[parameter] = parameter.grad
            else:
                parameter.grad = None
                del self._gradients[parameter]
        if changed:
            self._replica.sync()  # zeros on the device, not in the first graph
        return changed

    def check_unchanged(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuses what replicas with fewer minibatches could not follow.

        Raises:
            ValueError: Other parameters are trained than when the step began.
        """
        if any(p.requires_grad != (p in self._gradients) for p in parameters):
            raise ValueError(
                "requires_grad of a parameter changed between the minibatches of one "
                "step: freeze and unfreeze between steps, in a function that you "
                "attach, or between epochs"
            )

    def adopt(self, num_accumulated: int) -> None:
        """Takes back gradients that ``model.zero_grad()`` has detached.

        Args:
            num_accumulated: Minibatches that this step has already accumulated.

        Raises:
            ValueError: They would be lost.
        """
        for parameter, gradient in self._gradients.items():
            if parameter.grad is gradient:
                continue
            if num_accumulated:
                raise ValueError(
                    "gradients were replaced while this step accumulates them, so its "
                    f"first {num_accumulated} minibatches would be lost: remove "
                    "model.zero_grad() from the training loop; the optimizer zeroes "
                    "gradients itself"
                )
            with torch.no_grad():
                if parameter.grad is not None:
                    gradient.copy_(parameter.grad)
                else:  # thrown away, and no part of this minibatch
                    gradient.zero_()
            parameter.grad = gradient

    def rebind(self) -> None:
        """Puts the kept gradients back in place, without what may stand there now."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient

    def average_(
        self, num_minibatches: torch.Tensor, *passengers: torch.Tensor
    ) -> None:
        """gradient = sum over replicas / number of minibatches, shape ``(1,)``.

        Divided, not multiplied by a reciprocal: that would round twice. Passengers are
        summed in the same collective and not divided.
        """
        gradients = list(self._gradients.values())
        self._replica.all_reduce_([*gradients, *passengers])
        for gradient in gradients:
            gradient.div_(like_dimensions_of(gradient, num_minibatches))

    def clip_(self, max_norm: float) -> None:
        """Scales all gradients so that their global norm is at most ``max_norm``."""
        nn.utils.clip_grad_norm_(list(self._gradients), max_norm)

    def zero_(self) -> None:
        """Sets all gradients to zero, in place."""
        with torch.no_grad():
            for gradient in self._gradients.values():
                gradient.zero_()


def like_dimensions_of(tensor: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """``number``, of shape ``(1,)``, as an operand that leaves the shape of ``tensor``.

    With the dimensions it has it keeps its precision beside a narrower dtype.
    """
    return number if tensor.dim() else number.reshape(())
