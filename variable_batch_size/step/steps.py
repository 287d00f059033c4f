"""One replica's way through the steps: its minibatches, idle steps and epochs."""

from __future__ import annotations

import logging

from torch.optim import Optimizer

from variable_batch_size.data.schedule import Cursor, EpochPlan
from variable_batch_size.step.checks import HyperparameterWatch
from variable_batch_size.step.step_gradients import StepGradients
from xla_replica import Replica, ReplicaError

logger = logging.getLogger("variable_batch_size.optimizer")  # what users know it by


class Steps:
    """Says when an update is due, and refuses what would part the replicas.

    Makes no update itself: whoever asks makes it, moves `counter` on and then calls
    `end_update`.

    Args:
        plan: Of the first epoch, unless `begin_epoch` comes before a minibatch.
        replica: The replica whose way it is.
        inner: The torch optimizer, whose hyperparameters are watched.
        gradients: Of the step under way.

    Attributes:
        counter: Counts the minibatches and steps of the epoch under way.
        num_minibatches_seen: Minibatches it has run since someone set this to zero.
    """

    def __init__(
        self,
        plan: EpochPlan,
        replica: Replica,
        inner: Optimizer,
        gradients: StepGradients,
    ) -> None:
        self.counter = StepCounter(plan, replica.rank, announced=False)
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
        self._gradients.accept(self.counter.cursor.substep)
        counter = self.counter
        self._watch.check(
            self._inner.param_groups, counter.plan, counter.cursor, self._replica
        )
        self._gradients.end_minibatch()
        self.num_minibatches_seen += 1
        is_last = self.counter.count_minibatch()
        self._replica.sync()  # the minibatch graph ends here, on every replica alike
        if not is_last:
            self._watch.remember(self._inner.param_groups)
        return is_last

    def begin_idle_step(self) -> bool:
        """Whether this replica has no minibatch in the step under way: one is due."""
        if not self.counter.idle:
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
        counter = self.counter
        if not (counter.announced and counter.plan.epoch == epoch):
            return False
        if not counter.begun:
            return True  # idle steps are joined already
        self._refuse_to_repeat()
        return False

    def begin_epoch(self, plan: EpochPlan) -> None:
        """Leaves the epoch under way.

        Raises:
            ReplicaError: It has steps left, which other replicas take.
        """
        if self.counter.begun and not self.counter.ended:
            self._abandon()
        self.counter = StepCounter(plan, self._replica.rank, announced=True)
        self._gradients.refresh()
        self._watch.remember(self._inner.param_groups)

    def restart(self, plan: EpochPlan) -> None:
        """Stands where a restored run does; minibatches without an update are lost."""
        self.counter = StepCounter(plan, self._replica.rank, announced=False)
        self.num_minibatches_seen = 0
        self._gradients.discard()
        self._watch.allow_change()

    def _follow(self, plan: EpochPlan) -> None:
        before = self.counter
        self.counter = before.follow(plan)
        if self.counter is not before:
            self._watch.allow_change()  # it may change between epochs

    def _refuse_to_repeat(self) -> None:
        """A replica that idled all epoch takes the repetition for a second call."""
        if self.counter.ended and self._replica.num_replicas > 1:
            raise ReplicaError(
                f"epoch {self.counter.plan.epoch} has been trained; another pass "
                "needs another number, on several replicas",
                self._replica.rank,
            )

    def _abandon(self) -> None:
        """Gives up the rest of an epoch, where no other replica relies on it."""
        plan = self.counter.plan
        left = (
            f"epoch {plan.epoch} is abandoned after {self.counter.cursor.step} of "
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


class StepCounter:
    """Counts a replica's minibatches into steps, and steps into an epoch.

    Args:
        plan: The epoch's plan.
        rank: The replica.
        announced: Whether the user began the epoch with ``set_epoch``, which is where
            replicas join the steps at its beginning in which they are idle.

    Attributes:
        cursor: Where in the epoch this replica is.
        announced: See the argument; also true once the first minibatch has passed.
        begun: Whether the replica has run a minibatch of this epoch.
    """

    def __init__(self, plan: EpochPlan, rank: int, announced: bool) -> None:
        self.plan = plan
        self.cursor = Cursor(plan.epoch, plan.start_step)
        self.begun = False
        self.announced = announced
        self._rank = rank
        self._num_substeps = plan.num_substeps(rank)

    @property
    def ended(self) -> bool:
        """Whether the last step of the epoch is done."""
        return self.cursor.step >= self.plan.num_steps

    @property
    def idle(self) -> bool:
        """Whether this replica has no minibatch in the step under way."""
        return not self.ended and bool(self._num_substeps[self.cursor.step] == 0)

    @property
    def num_minibatches(self) -> int:
        """Minibatches of the step under way, over all replicas; 0 at the end."""
        return 0 if self.ended else int(self.plan.num_minibatches[self.cursor.step])

    @property
    def batch_size(self) -> int:
        """Global batch size of the step under way, in samples; 0 at the end."""
        return self.num_minibatches * self.plan.minibatch_size

    def count_minibatch(self) -> bool:
        """Counts one; returns whether it was this replica's last of the step."""
        self.begun = True
        epoch, step, substep = self.cursor
        self.cursor = Cursor(epoch, step, substep + 1)
        return bool(substep + 1 == self._num_substeps[step])

    def next_step(self) -> None:
        """Counts the step under way as done."""
        self.cursor = Cursor(self.cursor.epoch, self.cursor.step + 1)

    def follow(self, plan: EpochPlan) -> StepCounter:
        """Returns the counter for the next minibatch, whose sampler is at ``plan``.

        That is this counter, or a new one for the sampler's epoch if this one's has
        ended.

        Raises:
            ValueError: Sampler and optimizer are at different epochs, or the epoch has
                no such step.
            ReplicaError: The epoch begins with idle replicas and was not announced.
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
        counter._check_first_step()
        if counter.idle:
            raise ReplicaError(
                f"replica {self._rank} is idle in step {counter.cursor.step} of epoch "
                f"{plan.epoch} and has not joined it, because an earlier update or "
                "callback raised an exception: resume from a checkpoint",
                self._rank,
            )
        return counter

    def _check_first_step(self) -> None:
        plan = self.plan
        first = plan.num_minibatches[plan.start_step]
        if not self.announced and first < plan.num_replicas:
            raise ReplicaError(
                f"epoch {plan.epoch} begins with a step of {first} "
                f"minibatches on {plan.num_replicas} replicas: call "
                f"optimizer.set_epoch({plan.epoch}) before iterating, where idle "
                "replicas join that step before their first forward pass",
                self._rank,
            )
        self.announced = True
