"""An update of the weights: one program on every replica, for every batch size."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from variable_batch_size.rules.scaling import Scaling
from variable_batch_size.step.agreement import Agreement
from variable_batch_size.step.checks import hyperparameters
from variable_batch_size.step.device_scalars import Numbers
from variable_batch_size.step.step_gradients import StepGradients
from variable_batch_size.step.steps import StepCounter
from variable_batch_size.step.stop_vote import StopVote
from variable_batch_size.step.update import Update
from xla_replica import Replica


class UpdateGraph:
    """Sums over replicas, divides, measures, clips, scales, steps and zeroes.

    Args:
        inner: The torch optimizer.
        replica: Where updates run.
        numbers: Uploads.
        scaling: The rule.
        agreement: Whether replicas use the same hyperparameters.
        stop_vote: Whether they stop after this update.
        gradients: Of the step under way.
    """

    def __init__(
        self,
        inner: Optimizer,
        replica: Replica,
        numbers: Numbers,
        scaling: Scaling,
        agreement: Agreement,
        stop_vote: StopVote,
        gradients: StepGradients,
    ) -> None:
        self._inner = inner
        self._replica = replica
        self._numbers = numbers
        self._scaling = scaling
        self._agreement = agreement
        self._stop_vote = stop_vote
        self._gradients = gradients

    def run(
        self, counter: StepCounter, batch_ratio: float, max_grad_norm: float | None
    ) -> Update:
        """Makes the update of the step at ``counter``, which moves on.

        If an exception ends the update, the step is lost and gradients are zero.

        Args:
            counter: At the step, on this replica.
            batch_ratio: Its batch size over the reference.
            max_grad_norm: Clip the averaged gradient to this global norm.

        Raises:
            ValueError: See `Scaling.applied`.
            ReplicaError: Replicas have used different hyperparameters.
        """
        # Changing numbers go to the device before the collective is traced.
        groups = self._inner.param_groups
        own = (*hyperparameters(groups), *self._scaling.state_dict())
        ballot, vote = self._agreement.ballot(own), self._stop_vote.ballot()
        num_minibatches = counter.num_minibatches
        divisor = self._numbers.get("divisor", num_minibatches)
        scaling = self._scaling.applied(self._inner, batch_ratio)
        buffers, noise, squares = self._gradients.buffers, self._gradients.noise, []
        if noise:
            squares = noise.begin_update(num_minibatches, counter.batch_size)
        try:
            with torch.no_grad(), scaling as step:
                buffers.average_(divisor, ballot, vote, *squares)
                self._agreement.count(ballot)
                self._stop_vote.count(vote)
                factors = noise.update() if noise else None
                if max_grad_norm is not None:
                    buffers.clip_(max_grad_norm)
                lrs = step(factors if self._scaling.rule.measured else None)
        except BaseException:
            counter.next_step()  # whatever became of this update
            raise
        finally:
            self._gradients.discard()
            self._replica.sync()
        update = Update(
            epoch=counter.plan.epoch,
            step=counter.plan.first_step + counter.cursor.step,
            batch_size=counter.batch_size,
            minibatch_size=counter.plan.minibatch_size,
            lr=lrs,
            idle=counter.idle,
            ends_epoch=counter.cursor.step + 1 == counter.plan.num_steps,
        )
        counter.next_step()
        return update
