"""Parts of an update: the weights of minibatches, and clipping."""

from __future__ import annotations

import math
from typing import Any

import torch

from variable_batch_size.data.account import Account
from variable_batch_size.data.schedule import Step
from variable_batch_size.device_scalars import dtype_for
from variable_batch_size.part import Part
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.run import Run
from xla_replica.backends.small_sum import SmallSum
from xla_replica.common.arguments import check_number


class Weights(Part):
    """How many tokens the minibatches of a step have: the divisor of its gradient.

    Dividing by their sum makes the mean over all tokens of the step, whatever replica
    ran which minibatch. float32 counts exactly up to 2^24 tokens.

    Attributes:
        weight: The step's: a number on a CPU, where reading is free, else ``(1,)``.
        ratio: It over ``ref_weight``, if there is one.
    """

    weight: Any = None
    ratio: Any = None

    def __init__(self, run: Run, gradients: StepGradients) -> None:
        self._replica, self._gradients = run.replica, gradients
        self._scalars, self._ref_weight = run.scalars, run.ref_weight
        self._pads = run.sampler.schedule.pad_minibatches
        size = run.sampler.minibatch_size
        self._places = self._replica.send(torch.arange(size, dtype=torch.float32))
        self._was_read = False  # `of_samples`, in this minibatch
        self._dtype = dtype_for(run.parameters())
        self._slot = SmallSum(1, self._dtype, self._replica, run.sums.is_exact)

    def of_minibatch(self, weight: Any, account: Account) -> torch.Tensor:
        """Returns the weight of the next minibatch, ``(1,)``, on the device.

        Args:
            weight: What `ElasticOptimizer.step` was given: a number, a tensor with one
                element, or None. It is not read from a device.
            account: At a minibatch of which some may be padding.

        Raises:
            TypeError, ValueError: It is missing; or is negative, infinite or NaN, as
                far as that can be seen without a read.
        """
        if self._pads:
            num_real = account.num_real_samples
            self._check_samples_read(num_real)
            weight = num_real if weight is None else weight
        if account.is_padding:
            weight = 0
        if weight is None:
            raise TypeError(
                "step() with reduction='sum' needs weight=, the loss's number of tokens"
            )
        if not isinstance(weight, torch.Tensor):
            check_number("step: weight", weight, least=0)
            return self._replica.scalar(weight, self._dtype)
        weight = weight.detach().reshape(1)
        if weight.is_cpu:
            check_number("step: weight", 0 + weight.item(), least=0)  # also a bool
        return weight.to(self._replica.device, self._dtype)

    def of_samples(self, num_real: int) -> torch.Tensor:
        """Returns ``(minibatch_size,)``: 1 for so many real samples, then 0."""
        self._was_read = True
        number = self._scalars.get("samples", float(num_real))
        return (self._places < number).to(number.dtype)

    def _check_samples_read(self, num_real: int) -> None:
        """Raises ValueError if this minibatch has padding that its loss counts."""
        was_read, self._was_read = self._was_read, False
        padding = len(self._places) - num_real
        if padding and not was_read:
            raise ValueError(
                f"{padding} of {len(self._places)} samples of this minibatch are "
                "padding: call (losses * optimizer.sample_weights).sum().backward()"
            )

    def end_minibatch(self, weight: torch.Tensor | None) -> None:
        self._slot.add(weight)

    def tensors(self) -> list[torch.Tensor]:
        return [self._slot.total]

    def commit(self, step: Step) -> None:
        """Divides gradients by the step's weight.

        A step of weight zero has an infinite divisor, which makes its gradient zero.
        """
        total = self._slot.value().clone()
        self.weight = total.item() if self._replica.is_host else total
        if is_zero(self.weight):
            self._gradients.refuse_nonzero()
        self._gradients.sums.divide_(torch.where(total > 0, total, math.inf))
        if self._ref_weight is not None:
            self.ratio = self.weight / self._ref_weight

    def clear(self) -> None:
        self._slot.total.zero_()


class Clipping(Part):
    """Clips a step's gradient to a global norm.

    Attributes:
        norm: The last update's norm before it was clipped; None before it.
    """

    norm: torch.Tensor | None = None

    def __init__(self, run: Run, gradients: StepGradients, max_norm: float) -> None:
        self._run, self._sums, self._max_norm = run, gradients.sums, max_norm

    def commit(self, step: Step) -> None:
        # In an order that no replica and no resumed run has for itself.
        held = self._sums.gradients
        trained = [p for p in self._run.parameters() if p in held]
        self.norm = self._sums.clip_(trained, self._max_norm)


def is_zero(weight: Any) -> bool:
    """Returns whether a minibatch's weight is known to be zero, without a transfer."""
    return not (isinstance(weight, torch.Tensor) and not weight.is_cpu) and not weight
