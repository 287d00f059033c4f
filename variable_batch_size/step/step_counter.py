"""Counts one replica's minibatches, steps and epochs."""

from __future__ import annotations

import logging

from variable_batch_size.data.schedule import Cursor, EpochPlan
from xla_replica import ReplicaError

logger = logging.getLogger(__name__)


class StepCounter:
    """Counts a replica's minibatches into steps, and steps into an epoch.

    Args:
        plan: The epoch's plan.
        rank: The replica.
        announced: Whether the user began the epoch with ``set_epoch``, in which
            replicas join the first steps if they are idle in them.

    Attributes:
        cursor: The epoch and the step under way.
        substep: Minibatches of that step that the replica has run.
        announced: See the argument; also true once the first minibatch has passed.
        begun: Whether the replica has run a minibatch of this epoch.
    """

    def __init__(self, plan: EpochPlan, rank: int, announced: bool) -> None:
        self.plan = plan
        self.cursor = Cursor(plan.epoch, plan.start_step)
        self.substep = 0
        self.begun = False
        self.announced = announced
        self._rank = rank

    @property
    def ended(self) -> bool:
        """Whether the last step of the epoch is done."""
        return self.cursor.step >= self.plan.num_steps

    @property
    def idle(self) -> bool:
        """Whether this replica has no minibatch in the step under way."""
        return not self.ended and self._num_substeps == 0

    @property
    def _num_substeps(self) -> int:
        """Minibatches of the step under way that are this replica's."""
        return self.plan.num_substeps_of(self.cursor.step, self._rank)

    @property
    def num_minibatches(self) -> int:
        """Minibatches of the step under way, over all replicas; 0 at the end."""
        return 0 if self.ended else self.plan.num_minibatches_of(self.cursor.step)

    @property
    def batch_size(self) -> int:
        """Global batch size of the step under way, in samples; 0 at the end."""
        return 0 if self.ended else self.plan.batch_size(self.cursor.step)

    def check_attach(self) -> None:
        """Raises ReplicaError if what is attached now would miss updates here alone.

        An epoch in which this replica is always idle may be over or have just begun,
        so it gets a warning.
        """
        num_made = self.cursor.step - self.plan.start_step
        if not (self.announced and num_made and self.plan.has_idle_replicas):
            return
        if self.begun and self.ended:
            return
        text = (
            f"attach: this replica is {num_made} updates into epoch {self.plan.epoch} "
            "already, those that set_epoch has joined included, and other replicas "
            "may not be: what is attached would run different numbers of times. Call "
            "attach before optimizer.set_epoch"
        )
        if not self.ended:
            raise ReplicaError(text, self._rank)
        logger.warning(text)

    @property
    def is_at_last(self) -> bool:
        """Whether the next minibatch is this replica's last of the step under way."""
        return not self.ended and self.substep == self._num_substeps - 1

    @property
    def num_real_samples(self) -> int:
        """Samples of the next minibatch that count; the others are padding."""
        step = self.cursor.step
        return self.plan.num_real_samples(self._rank, step, self.substep)

    @property
    def is_padding(self) -> bool:
        """Whether the next minibatch is run for its collectives alone."""
        return self.plan.padded and not self.ended and self.num_real_samples == 0

    def count_minibatch(self) -> bool:
        """Counts one; returns whether it was this replica's last of the step."""
        self.begun = True
        self.substep += 1
        return self.substep == self._num_substeps

    def next_step(self) -> None:
        """Counts the step under way as done."""
        self.cursor = Cursor(self.cursor.epoch, self.cursor.step + 1)
        self.substep = 0

    def replan(self, plan: EpochPlan) -> None:
        """Takes another plan of the epoch, equal in the steps that are begun."""
        self.plan = plan

    def follow(self, plan: EpochPlan) -> StepCounter:
        """Returns the counter for the next minibatch, whose sampler is at ``plan``.

        That is this counter, or a new one if this one's epoch has ended. Raises
        ValueError or ReplicaError if there is no such minibatch.
        """
        counter = self
        if (plan.epoch, plan.start_step) != (self.plan.epoch, self.plan.start_step):
            if not self.ended and (self.announced or self.begun):
                raise ValueError(
                    f"the optimizer is at step {self.cursor.step} of epoch "
                    f"{self.plan.epoch} and the sampler at epoch {plan.epoch}: call "
                    "set_epoch on both before every epoch, and restore both (the "
                    "optimizer's load_state_dict does) before the first"
                )
            counter = StepCounter(plan, self._rank, announced=False)
        if counter.ended:
            raise ValueError(
                f"step() after the last of the {plan.num_steps} steps of epoch "
                f"{plan.epoch}: call set_epoch({plan.epoch + 1}) on sampler and "
                "optimizer, and step() once per minibatch of the sampler"
            )
        first = plan.num_minibatches_of(plan.start_step)
        may_idle = first < plan.num_replicas and not plan.padded
        if not counter.announced and may_idle:
            raise ReplicaError(
                f"epoch {plan.epoch} begins with a step of {first} "
                f"minibatches on {plan.num_replicas} replicas: call "
                f"optimizer.set_epoch({plan.epoch}) before iterating, where idle "
                "replicas join that step before their first forward pass",
                self._rank,
            )
        counter.announced = True
        if counter.idle:
            raise ReplicaError(
                f"replica {self._rank} is idle in step {counter.cursor.step} of epoch "
                f"{plan.epoch} and has not joined it, because an earlier update or "
                "callback raised an exception: resume from a checkpoint; or because "
                "of lockstep=True: call join_step() in place of step()",
                self._rank,
            )
        return counter
