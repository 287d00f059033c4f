"""One replica's way through the steps: its minibatches, idle steps and epochs."""

from __future__ import annotations

import logging

from torch.optim import Optimizer

from variable_batch_size.data.schedule import EpochPlan
from variable_batch_size.step.checks import HyperparameterWatch
from variable_batch_size.step.cursor import Position
from variable_batch_size.step.step_gradients import StepGradients
from xla_replica import Replica, ReplicaError

logger = logging.getLogger("variable_batch_size.optimizer")  # what users know it by


class Steps:
    """Says when an update is due, and refuses what would part the replicas.

    Makes no update itself: whoever asks makes it, moves `position` on and then calls
    `end_update`.

    Args:
        plan: Of the first epoch, unless `begin_epoch` comes before a minibatch.
        replica: The replica whose way it is.
        inner: The torch optimizer, whose hyperparameters are watched.
        gradients: Of the step under way.

    Attributes:
        position: Where in its epoch this replica stands.
        num_minibatches_seen: Minibatches it has run since someone set this to zero.
    """

    def __init__(
        self,
        plan: EpochPlan,
        replica: Replica,
        inner: Optimizer,
        gradients: StepGradients,
    ) -> None:
        self.position = Position(plan, replica.rank, announced=False)
        self.num_minibatches_seen = 0
        self._replica = replica
        self._inner = inner
        self._gradients = gradients
        self._watch = HyperparameterWatch()

    def end_minibatch(self, plan: EpochPlan) -> bool:
        """Takes in a minibatch, whose backward pass has just run.

        Args:
            plan: Of the epoch that the sampler is at.

        Returns:
            Whether it was this replica's last of the step: an update is due.

        Raises:
            ValueError, ReplicaError: See `ElasticOptimizer.step`.
        """
        self._follow(plan)
        self._gradients.accept(self.position.substep)
        self._watch.check(self._inner.param_groups, self.position, self._replica)
        self._gradients.end_minibatch()
        self.num_minibatches_seen += 1
        is_last = self.position.count_minibatch()
        self._replica.sync()  # the minibatch graph ends here, on every replica alike
        if not is_last:
            self._watch.remember(self._inner.param_groups)
        return is_last

    def begin_idle_step(self) -> bool:
        """Whether this replica has no minibatch in the step under way: one is due."""
        if not self.position.idle:
            return False
        self._gradients.stand_ready()
        self._replica.sync()  # what the user left pending is no part of the update
        return True

    def end_update(self) -> None:
        """After what is attached has run."""
        self._gradients.refresh()  # they may have frozen or unfrozen parameters
        self._watch.remember(self._inner.param_groups)

    # --- epochs ---------------------------------------------------------------------

    def stands_before(self, epoch: int) -> bool:
        """Whether the epoch has been announced and not begun: a second call.

        Raises:
            ReplicaError: The epoch has been trained, on several replicas.
        """
        position = self.position
        if not (position.announced and position.plan.epoch == epoch):
            return False
        if not position.begun:
            return True  # idle steps are joined already
        self._refuse_to_repeat()
        return False

    def begin_epoch(self, plan: EpochPlan) -> None:
        """Leaves the epoch under way.

        Raises:
            ReplicaError: It has steps left, which other replicas take.
        """
        if self.position.begun and not self.position.ended:
            self._abandon()
        self.position = Position(plan, self._replica.rank, announced=True)
        self._gradients.refresh()
        self._watch.remember(self._inner.param_groups)

    def restart(self, plan: EpochPlan) -> None:
        """Stands where a restored run does; minibatches without an update are lost."""
        self.position = Position(plan, self._replica.rank, announced=False)
        self.num_minibatches_seen = 0
        self._gradients.discard()
        self._watch.allow_change()

    def _follow(self, plan: EpochPlan) -> None:
        before = self.position
        self.position = before.follow(plan)
        if self.position is not before:
            self._watch.allow_change()  # it may change between epochs

    def _refuse_to_repeat(self) -> None:
        """A replica that idled all epoch takes the repetition for a second call."""
        if self.position.ended and self._replica.num_replicas > 1:
            raise ReplicaError(
                f"epoch {self.position.plan.epoch} has been trained; another pass "
                "needs another number, on several replicas",
                self._replica.rank,
            )

    def _abandon(self) -> None:
        """Gives up the rest of an epoch, where no other replica relies on it."""
        plan = self.position.plan
        left = (
            f"epoch {plan.epoch} is abandoned after {self.position.step} of "
            f"{plan.num_steps} steps"
        )
        if self._replica.num_replicas > 1:
            raise ReplicaError(
                f"{left}, and the other replicas would wait for this one: run every "
                "minibatch of the sampler; to train less, shorten the trace",
                self._replica.rank,
            )
        logger.warning(left)
        self._gradients.discard()
