"""The two programs of a step: a minibatch is accumulated, and an update is made.

A compiled backend runs each of them whatever the batch sizes, and the second one is the
same on every replica; docs/architecture.md ("Two graphs") tells what keeps it so.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.device_scalars import DeviceScalars, dtype_for
from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.proxy import OptimizerProxy
from variable_batch_size.rules.scaling import Scaling
from variable_batch_size.step.agreement import Agreement, hyperparameters
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.settings import Settings
from variable_batch_size.step.step_counter import StepCounter
from variable_batch_size.step.weights import SampleMask, StepWeight
from xla_replica import Replica


class StepPrograms:
    """Accumulates a step's minibatches, and makes new weights of their mean.

    Construction is collective: parameters are made equal to those of replica 0.

    Args:
        optimizer: The wrapper, whose inner optimizer steps.
        sampler: The sampler that feeds the replica.
        settings: Those of the wrapper.
        replica: The replica that the caller runs in.
        scalars: Where numbers that change are kept on the device.
        noise: Measures the gradients, or does not exist.
        overlap: See `ElasticOptimizer`.

    Attributes:
        agreement: Whether replicas agree.
        grad_norm: See `ElasticOptimizer`.
        mask: Which samples of a minibatch count.
        scaling: The rule, and its state.
    """

    def __init__(
        self,
        optimizer: OptimizerProxy,
        sampler: CustomSampler,
        settings: Settings,
        replica: Replica,
        scalars: DeviceScalars,
        noise: NoiseMeter | None,
        overlap: bool,
    ) -> None:
        # It holds this object; dropped, it is gone at once, and inner may step itself.
        self._optimizer = weakref.proxy(optimizer)
        self._sampler = sampler
        self._settings = settings
        self._replica = replica
        self._scalars = scalars
        self._noise = noise
        late_ratio = settings.ref_weight is not None
        self.scaling = Scaling(settings.rule, replica, scalars, late_ratio)
        self.agreement = Agreement(replica, scalars, settings.lockstep)
        self.grad_norm: torch.Tensor | None = None
        self._weight = None
        if settings.reduction == "sum":
            groups = optimizer.param_groups
            dtype = dtype_for(p for group in groups for p in group["params"])
            self._weight = StepWeight(replica, dtype)
        self._gradients = StepGradients(optimizer.inner, replica, noise, overlap)
        self.mask = SampleMask(sampler.minibatch_size, replica, scalars)

    # --- which parameters, and what comes next --------------------------------------

    def add(self, parameters: list[Any]) -> None:
        """Makes new parameters those of replica 0. Collective."""
        self._gradients.add(parameters)

    def note_parameters(self) -> None:
        """Takes parameters to train and hyperparameters for those of every replica."""
        self._gradients.refresh()
        self.remember()

    def remember(self) -> None:
        """Takes hyperparameters for those of every replica."""
        self.agreement.remember(self._optimizer.inner.param_groups)

    def expect(self, counter: StepCounter) -> None:
        """Says what the next minibatch is to the sum of the gradients."""
        self._gradients.expect(
            counter.substep == 0,
            counter.is_at_last,
            counter.num_minibatches,
            counter.num_minibatches if self._weight is None else None,
            not counter.is_padding,
        )

    def stand_in(self) -> None:
        """Prepares for an update to which this replica brings no minibatch."""
        self._gradients.stand_in()
        self._replica.sync()  # keeps what the user left pending out of the update

    # --- a minibatch ----------------------------------------------------------------

    def weigh(self, counter: StepCounter, weight: Any) -> torch.Tensor | None:
        """Returns the next minibatch's weight on the device, without a read.

        Args:
            counter: Where the replica is.
            weight: As the user gives it to `ElasticOptimizer.step`.

        Returns:
            ``(1,)``; None if all minibatches count the same.
        """
        if self._weight is None:
            if weight is not None:
                raise TypeError(
                    "step(weight=...) needs reduction='sum': build the optimizer with "
                    "it, and let the loss be the sum over tokens, not their mean"
                )
            return None
        if self._sampler.schedule.pad_minibatches:
            num_real = counter.num_real_samples
            self.mask.end_minibatch(num_real)
            weight = num_real if weight is None else weight
        if counter.is_padding:
            weight = 0
        if weight is None:
            raise TypeError(
                "step() with reduction='sum' needs weight=, the number of tokens whose "
                "losses the minibatch's loss sums: optimizer.step(weight=num_tokens)"
            )
        return self._weight.on_device(weight)

    def accumulate(
        self, counter: StepCounter, weight: torch.Tensor | None, needs_backward: bool
    ) -> None:
        """Takes in what a minibatch's backward pass has left in ``.grad``.

        Args:
            counter: Where the replica is.
            weight: As `weigh` returned it.
            needs_backward: Whether a minibatch without any gradient is an error.
        """
        self._gradients.accept(counter.substep, weight, needs_backward)
        if self._weight is not None:
            self._weight.add(weight)
        self.agreement.check_unchanged(self._optimizer.inner.param_groups, counter)

    # --- an update ------------------------------------------------------------------

    def update(self, counter: StepCounter) -> tuple[tuple[Any, ...], Any]:
        """Sums over replicas, divides, measures, clips, scales and steps.

        It is one program on every replica, for every batch size. Returns the effective
        learning rate of each parameter group, and the step's weight.
        """
        # Changing numbers go to the device before the collective is traced.
        settings, optimizer = self._settings, self._optimizer
        num_minibatches, batch_size = counter.num_minibatches, counter.batch_size
        groups = optimizer.inner.param_groups
        used = (*hyperparameters(groups), *self.scaling.state_dict())
        order = self._sampler.order_digest(counter.plan.epoch)
        ballots = self.agreement.ballots(used, order)
        squares = []
        if self._noise:
            squares = self._noise.begin_update(num_minibatches, batch_size)
        weights = [] if self._weight is None else [self._weight.to_sum()]
        divisor: Any = num_minibatches if self._weight is None else None
        if divisor is not None and self._replica.is_lazy:
            divisor = self._scalars.get("divisor", num_minibatches)
        ratio: Any = None if settings.ref_weight else settings.batch_ratio(batch_size)
        with torch.no_grad():
            step = self.scaling.prepare(optimizer.inner, ratio)
            self._gradients.sum_(ballots, *squares, *weights, divisor=divisor)
            self.agreement.count(ballots)
            total = None
            if self._weight is not None:
                total, divisor, ratio = self._weight.count(settings.ref_weight)
                self._gradients.divide_(divisor)
            factors = self._noise.update(total) if self._noise else None
            if settings.max_grad_norm is not None:
                self.grad_norm = self._gradients.clip_(settings.max_grad_norm)
            with optimizer.stepping():
                lrs = step(factors if settings.rule.measured else None, ratio)
            return lrs, total

    def discard(self) -> None:
        """Forgets what the step under way has accumulated."""
        self._gradients.discard()
        if self._weight is not None:
            self._weight.discard()
