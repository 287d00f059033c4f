"""The weights of a step's minibatches, such as numbers of tokens, on the device."""

from __future__ import annotations

import math
from typing import Any

import torch

from variable_batch_size.device_scalars import DeviceScalars
from xla_replica import Replica
from xla_replica.common.arguments import check_number


class StepWeight:
    """The sum of the weights of the minibatches that this replica has accumulated.

    It is summed over replicas in the collective of the gradients, so that dividing by
    it makes the mean over all tokens of the step, whatever replica ran which minibatch.

    Args:
        replica: The replica that runs the minibatches.
        dtype: The dtype of the sum. float32 counts exactly up to 2^24 tokens a step.
    """

    def __init__(self, replica: Replica, dtype: torch.dtype) -> None:
        self._replica = replica
        self._sum = torch.zeros(1, dtype=dtype, device=replica.device)

    def on_device(self, weight: Any) -> torch.Tensor:
        """Returns a minibatch's weight as ``(1,)`` on the device, without a read.

        Args:
            weight: A number, or a tensor with one element.

        Raises:
            TypeError, ValueError: It is neither; or is negative, infinite or NaN, as
                far as that can be seen without a read.
        """
        if not isinstance(weight, torch.Tensor):
            check_number("step: weight", weight, least=0)
            return self._replica.scalar(weight, self._sum.dtype)
        if weight.numel() != 1 or weight.is_complex():
            raise ValueError(
                "step: weight must be a number or a real tensor with one element, got "
                f"a {weight.dtype} tensor of shape {tuple(weight.shape)}"
            )
        weight = weight.detach().reshape(1)
        if weight.device.type == "cpu":
            value = weight.item()
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"step: weight must be a finite number >= 0, got {value!r}"
                )
        return weight.to(self._replica.device, self._sum.dtype)

    def add(self, weight: torch.Tensor) -> None:
        """Adds a minibatch's weight, as `on_device` returned it."""
        self._sum.add_(weight)

    def to_sum(self) -> torch.Tensor:
        """Returns what is to be summed over replicas, in place: ``(1,)``."""
        return self._sum

    def count(self, ref_weight: float | None) -> tuple[Any, torch.Tensor, Any]:
        """Returns the step's weight, the divisor of its gradient, and the batch ratio.

        Call it after the sum. Weight and ratio are numbers on a CPU, where reading is
        free, else ``(1,)``; the ratio is None without ``ref_weight``. A step of weight
        zero has a divisor of one, so that its gradient stays zero.
        """
        total = self._sum.clone()
        divisor = torch.where(total > 0, total, torch.ones_like(total))
        weight = total.item() if self._replica.is_host else total
        return weight, divisor, None if ref_weight is None else weight / ref_weight

    def discard(self) -> None:
        """Forgets the minibatches of the step."""
        with torch.no_grad():
            self._sum.zero_()


class SampleMask:
    """Which samples of a minibatch count, and whether the loss has left out the others.

    Args:
        minibatch_size: Samples in every minibatch, with its padding.
        replica: The replica that runs the minibatches.
        scalars: Where numbers of samples are kept on the device.
    """

    def __init__(
        self, minibatch_size: int, replica: Replica, scalars: DeviceScalars
    ) -> None:
        numbers = torch.arange(minibatch_size, dtype=torch.float32)
        self._numbers = replica.send(numbers)
        self._scalars = scalars
        self._asked = False

    def weights(self, num_real: int) -> torch.Tensor:
        """Returns ``(minibatch_size,)``: 1 for so many real samples, then 0."""
        self._asked = True
        number = self._scalars.get("samples", float(num_real))
        return (self._numbers < number).to(number.dtype)

    def end_minibatch(self, num_real: int) -> None:
        """Raises ValueError if it had padding and nobody has asked for `weights`."""
        asked, self._asked = self._asked, False
        padding = len(self._numbers) - num_real
        if padding and not asked:
            raise ValueError(
                f"{padding} of the {len(self._numbers)} samples of this minibatch are "
                "padding, and nobody has asked for optimizer.sample_weights, which "
                "leave them out: call (losses * optimizer.sample_weights).sum()"
                ".backward() with the loss of every sample (reduction='none' in "
                "torch's losses)"
            )


def is_zero(weight: Any) -> bool:
    """Returns whether a minibatch's weight is known to be zero, without a transfer."""
    if weight is None or (isinstance(weight, torch.Tensor) and not weight.is_cpu):
        return False
    return not weight
