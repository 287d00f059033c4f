"""The small numbers of a step that replicas sum together with its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import xla_replica
from variable_batch_size.data.schedule import Step
from variable_batch_size.device_scalars import dtype_for
from variable_batch_size.step.agreement import Agreement
from variable_batch_size.step.scaling import Scaling
from variable_batch_size.step.settings import StepContext
from xla_replica.backends.small_sum import SmallSum
from xla_replica.common.arguments import check_number
from xla_replica.common.trees import without_numpy

Groups = list[dict[str, Any]]


class StepTotals:
    """Collects what travels in the sum of a step's gradients, and reads the sums.

    That is: ballots, where there are several replicas; the squares of the noise meter;
    and, with ``reduction='sum'``, the weights of the minibatches, such as their numbers
    of tokens. Dividing by the sum of these makes the mean over all tokens of the step,
    whatever replica ran which minibatch. float32 counts exactly up to 2^24 tokens.

    Attributes:
        agreement: Whether replicas agree; None where there is one replica for good.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        replica = context.replica
        self.agreement: Agreement | None = None
        if replica.num_replicas > 1 or replica.is_live:
            self.agreement = Agreement(replica, context.scalars)
        self._ballots: torch.Tensor | None = None
        self._was_asked = False  # to stop, if it is alone, before the last update
        size = context.sampler.minibatch_size
        self._places = replica.send(torch.arange(size, dtype=torch.float32))
        self._was_read = False  # `sample_weights`, in this minibatch
        self._dtype = dtype_for(context.parameters())
        self._weight: SmallSum | None = None
        if context.settings.reduction == "sum":
            is_exact = context.exact is not None
            self._weight = SmallSum(1, self._dtype, replica, is_exact)

    # --- a minibatch ----------------------------------------------------------------

    def on_device(self, weight: Any) -> torch.Tensor | None:
        """Returns a minibatch's weight as ``(1,)`` on the device, without a read.

        Args:
            weight: What `ElasticOptimizer.step` was given: a number, a tensor with one
                element, or None.

        Returns:
            None with ``reduction='mean'``, where all minibatches count the same.

        Raises:
            TypeError, ValueError: It is missing, or not to be given; or is negative,
                infinite or NaN, as far as that can be seen without a read.
        """
        if self._weight is None:
            if weight is not None:
                raise TypeError(
                    "step(weight=...) needs reduction='sum': build the optimizer with "
                    "it, and let the loss be the sum over tokens, not their mean"
                )
            return None
        if weight is None:
            raise TypeError(
                "step() with reduction='sum' needs weight=, the loss's number of tokens"
            )
        replica, dtype = self._context.replica, self._dtype
        if not isinstance(weight, torch.Tensor):
            check_number("step: weight", weight, least=0)
            return replica.scalar(weight, dtype)
        if weight.numel() != 1 or weight.is_complex():
            raise ValueError(
                "step: weight must be a number or a real tensor with one element, got "
                f"a {weight.dtype} tensor of shape {tuple(weight.shape)}"
            )
        weight = weight.detach().reshape(1)
        if weight.is_cpu:
            check_number("step: weight", 0 + weight.item(), least=0)  # also a bool
        return weight.to(replica.device, dtype)

    def sample_weights(self, num_real: int) -> torch.Tensor:
        """Returns ``(minibatch_size,)``: 1 for so many real samples, then 0."""
        self._was_read = True
        number = self._context.scalars.get("samples", float(num_real))
        return (self._places < number).to(number.dtype)

    def check_weights_read(self, num_real: int) -> None:
        """Raises ValueError if this minibatch has padding that its loss counts."""
        was_read, self._was_read = self._was_read, False
        padding = len(self._places) - num_real
        if padding and not was_read:
            raise ValueError(
                f"{padding} of {len(self._places)} samples of this minibatch are "
                "padding: call (losses * optimizer.sample_weights).sum().backward()"
            )

    def add(self, weight: torch.Tensor) -> None:
        """Adds a minibatch's weight, as `on_device` returned it."""
        self._weight.add(weight)

    # --- an update ------------------------------------------------------------------

    def to_sum(
        self, step: Step, scaling: Scaling, common: Sequence[Any] = ()
    ) -> list[torch.Tensor]:
        """Returns what is to be summed over replicas, in place.

        Args:
            step: The step.
            scaling: The rule, whose state must be that of all replicas.
            common: What else is the same on all replicas: which parameters are trained,
                and what runs after the update on members of a live run.
        """
        context = self._context
        totals = []
        if self.agreement is None:
            self._was_asked |= xla_replica.stop_requested() is not None
        else:
            order = context.sampler.order_digest(step.epoch)
            groups = context.inner.param_groups
            used = hyperparameters(groups), scaling.state_dict(), *common
            self._ballots = self.agreement.ballots(used, order, step.num_minibatches)
            totals.append(self._ballots)
        if context.noise:
            totals += context.noise.to_sum(step.num_minibatches, step.batch_size)
        if context.exact:
            totals += context.exact.to_sum(step)
        return totals if self._weight is None else [*totals, self._weight.total]

    def of_nothing(self, common: Sequence[Any]) -> list[torch.Tensor]:
        """Returns what `to_sum` does, with no minibatch, rate or scaling in it.

        Its ballots differ from those of a replica that makes an update.
        """
        noise = self._context.noise
        others = noise.to_sum(1, 1) if noise else []
        if self._weight is not None:
            others.append(self._weight.total)
        ballots = self.agreement.ballots(tuple(common), None, 0)
        return [ballots, *(torch.zeros_like(other) for other in others)]

    def take(self) -> tuple[Any, torch.Tensor | None]:
        """Reads what `to_sum` returned, once it is summed.

        Returns:
            The step's weight and the divisor of its gradient. The weight is a number on
            a CPU, where reading is free, else ``(1,)``. A step of weight zero has an
            infinite divisor, which makes its gradient zero whatever its loss is. With
            ``reduction='mean'`` both are None.

        Raises:
            ReplicaError: Replicas are seen to differ.
        """
        if self.agreement is not None:
            self.agreement.count(self._ballots)
        if self._weight is None:
            return None, None
        total = self._weight.value().clone()
        divisor = torch.where(total > 0, total, math.inf)
        return total.item() if self._context.replica.is_host else total, divisor

    def stop_agreed(self, look: bool, every_seconds: float) -> bool:
        """Returns whether all replicas stop after the update that was made last.

        See `Agreement.stop_agreed`. A replica that is alone agrees with itself.
        """
        if self.agreement is None:
            return self._was_asked
        return self.agreement.stop_agreed(look, every_seconds)

    def clear(self) -> None:
        """Forgets the minibatches of the step."""
        if self._weight is not None:
            self._weight.total.zero_()


def is_zero(weight: Any) -> bool:
    """Returns whether a minibatch's weight is known to be zero, without a transfer."""
    return not (isinstance(weight, torch.Tensor) and not weight.is_cpu) and not weight


def hyperparameters(groups: Groups) -> tuple[Any, ...]:
    """Returns the name and value of every number in the parameter groups.

    NumPy's are those of Python, as in a checkpoint that another replica has loaded.
    """
    found = []
    for group in groups:
        for name, value in group.items():
            if isinstance(value, (np.generic, tuple)):
                value = without_numpy(value)
            if isinstance(value, (int, float, tuple)):
                found.append((name, value))
    return tuple(found)
