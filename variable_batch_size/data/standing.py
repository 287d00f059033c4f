"""Where an optimizer is in its epochs, and how it enters the next one."""

from __future__ import annotations

import logging

from variable_batch_size.data.ledger import Ledger
from variable_batch_size.data.schedule import Cursor, EpochPlan, Step
from xla_replica import ReplicaError

logger = logging.getLogger(__name__)


class Standing:
    """The steps of an epoch that one optimizer has committed, on one replica.

    Attributes:
        ledger: That of its sampler.
        plan: That of the epoch under way.
        epoch, number, substep: The epoch, how many of its steps are committed, and how
            many minibatches of the next step this replica has trained.
        now: The next step; None after the epoch's last.
        ended, idle: Whether all steps are committed, and whether this replica has no
            minibatch in the next one.
        announced: Whether the user began the epoch by ``set_epoch``, in which replicas
            join the first steps if they are idle in them, or no replica is idle there.
        has_run: Whether this replica has trained a minibatch of the epoch.
        is_waiting: Whether it has ended a step that other optimizers have not.
        strict: Whether nothing may be read ahead, since it is lost if a step is rerun,
            and epochs are to be begun before their first backward pass.
    """

    plan: EpochPlan
    now: Step | None
    announced = has_run = strict = False

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.go_to(ledger.epoch, ledger.plan(ledger.epoch).start_step)

    @property
    def cursor(self) -> Cursor:
        """The epoch, and how many of its steps are committed."""
        return Cursor(self.epoch, self.number)

    @property
    def global_step(self) -> int:
        """How many steps are committed since training began."""
        return self.plan.first_step + self.number

    @property
    def num_real_samples(self) -> int:
        """Samples of the next minibatch that count; the others are padding."""
        return self.plan.num_real_samples(self.ledger.rank, self.number, self.substep)

    @property
    def is_padding(self) -> bool:
        """Whether the next minibatch is run for its collectives alone."""
        return self.plan.padded and not self.ended and self.num_real_samples == 0

    def go_to(self, epoch: int, number: int) -> None:
        """Goes to a step of an epoch."""
        self.epoch, self.number, self.substep = epoch, number, 0
        self.is_waiting = False
        self.replan()

    def replan(self) -> None:
        """Follows a plan that is equal in the steps that have begun."""
        self.plan = self.ledger.plan(self.epoch)
        self.now = now = self.plan.step(self.number, self.ledger.rank)
        self.ended, self.idle = now is None, now is not None and now.idle

    def enter(self, epoch: int) -> None:
        """Goes to the epoch of the next minibatch; raises as `Account.check` does."""
        rank, num_replicas = self.ledger.rank, self.plan.num_replicas
        if epoch != self.epoch:
            if self.announced and not self.ended:
                raise ValueError(
                    f"the optimizer is at step {self.number} of epoch {self.epoch} and "
                    f"the sampler at epoch {epoch}: call set_epoch on both"
                )
            if self.strict:
                raise ValueError(
                    f"epoch {epoch} was begun by the sampler alone: exact sums and "
                    "live runs need optimizer.set_epoch(epoch) before its minibatches"
                )
            self.announced = self.has_run = False
            self.go_to(epoch, self.ledger.plan(epoch).start_step)
        if self.now is None:
            raise ValueError(
                f"step() after the last of the {self.number} steps of epoch {epoch}: "
                f"call set_epoch({epoch + 1}) on sampler and optimizer"
            )
        num = self.now.num_minibatches
        if num < num_replicas and not (self.announced or self.plan.padded):
            raise ReplicaError(
                f"{num} of {num_replicas} replicas have a minibatch in the first step: "
                f"call optimizer.set_epoch({epoch}), where the others join, first",
                rank,
            )
        self.announced = True
        if self.idle:
            raise ReplicaError(
                f"replica {rank} is idle in step {self.number} and has not joined it: "
                "resume from a checkpoint; or, with lockstep=True, call join_step()",
                rank,
            )

    def begin(self, epoch: int) -> bool | None:
        """Begins an epoch; returns whether minibatches that were trained are lost.

        Returns None if the epoch has begun already. Raises ReplicaError where other
        replicas would not begin it too.
        """
        is_same = self.announced and epoch == self.epoch
        # A second call, idle steps are joined already; or others have trained it.
        if (is_same and not self.has_run) or self.ledger.is_passed(epoch):
            return None
        plan = self.ledger.begin_epoch(epoch)
        is_lost, problem = self.has_run and not self.ended, ""
        if is_lost:
            problem = (
                f"epoch {self.epoch} is abandoned after {self.number} of "
                f"{self.plan.num_steps} steps: to train less, shorten the trace"
            )
        elif is_same:
            # A replica that idled all epoch takes the repetition for a second call.
            problem = (
                f"epoch {epoch} has been trained; another pass needs another number: "
                "this one has the same order and steps"
            )
        if problem and self.ledger.num_replicas > 1:
            raise ReplicaError(problem, self.ledger.rank)
        if problem:
            logger.warning(problem)
        self.go_to(epoch, plan.start_step)
        self.announced, self.has_run = True, False
        if is_lost:
            self.ledger.redeal()  # a loop that goes on deals the epoch's first step
        return is_lost
