"""Where one optimizer is in its epochs: what it has trained and committed of a deal."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

from variable_batch_size.data.ledger import Ledger
from variable_batch_size.data.schedule import Cursor, EpochPlan, Place, Step
from xla_replica import ReplicaError

logger = logging.getLogger(__name__)


class Account:
    """Which minibatches one optimizer was handed, has trained and has committed.

    Args:
        ledger: That of its sampler, which holds it while the optimizer lives.
        key: What it updates; an account of the same takes its place.

    Attributes:
        ledger: As it was given.
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
        owner: What makes its updates.
        strict: Whether nothing may be read ahead, since it is lost if a step is rerun.
    """

    plan: EpochPlan
    now: Step | None
    announced = has_run = strict = False
    owner: Any = None

    def __init__(self, ledger: Ledger, key: int) -> None:
        self.ledger = ledger
        self.go_to(ledger.epoch, ledger.plan(ledger.epoch).start_step)
        self.begin_loop(is_followed=False)
        ledger.accounts[key] = self

    # --- where training is --------------------------------------------------------

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

    # --- minibatches --------------------------------------------------------------

    def begin_loop(self, is_followed: bool) -> None:
        """Notes that a loop begins; see `Ledger.followed`."""
        self._handed: deque[tuple[int, Place]] = deque()
        self._handing_thread = self._training_thread = 0
        # Whether the loop reads ahead; unknown before its first step().
        self._reads_ahead = False if is_followed else None

    def take(self, deal: int, place: Place, is_run: bool) -> None:
        """Notes a minibatch that is loaded next; or, if ``is_run``, trained next."""
        if is_run:
            self._handed.append((deal, place))
            self._handing_thread = threading.get_ident()

    def check(self) -> None:
        """Goes to the epoch of the minibatch that was handed out; changes nothing else.

        Raises:
            ValueError: It is not the next minibatch of this replica: the loop has left
                one out, or its data are from somewhere else, or the epoch is over.
            ReplicaError: This replica is idle in the step, or was and did not join it.
        """
        deal, place = self._handed[0] if self._handed else (self.ledger.deal, None)
        epoch = self.ledger.epoch if place is None else place.epoch
        if epoch != self.epoch or self.ended or self.idle or not self.announced:
            self.enter(epoch)
        if place is None:
            raise ValueError(
                "step() is for a minibatch that the sampler has not dealt: build the "
                "loader by DataLoader(dataset, batch_sampler=sampler), or iterate that"
            )
        if deal != self.ledger.deal:
            raise ValueError(
                f"step() is for a minibatch of step {place.step} that was dealt anew: "
                "iterate replica.loader(loader); begin a new loop after load_state_dict"
            )
        num_handed = len(self._handed)
        if self.strict and num_handed > 1:
            raise ValueError(
                f"{num_handed} minibatches were read and not trained: nothing may read "
                "ahead; iterate replica.loader(loader)"
            )
        if self._reads_ahead is None:
            self._reads_ahead = num_handed > 1
        self._training_thread = threading.get_ident()
        # Trainers read all minibatches of a step at once, and a thread any number.
        is_ahead = self._handed[-1][1].step != place.step and self._is_read_here()
        is_next = place[1:] == (self.number, self.substep)
        if (is_ahead and not self._reads_ahead) or not is_next:
            raise left_out(self.epoch)

    def train(self) -> bool:
        """Counts the minibatch as trained; returns whether it ends this replica's step.

        Call it after `check`.
        """
        self._handed.popleft()
        self.has_run = True
        self.substep += 1
        return self.now is not None and self.substep == self.now.num_substeps

    def commit(self) -> None:
        """Counts the step under way as done."""
        self.number, self.substep = self.number + 1, 0
        self.now = now = self.plan.step(self.number, self.ledger.rank)
        self.ended, self.idle = now is None, now is not None and now.idle
        self.ledger.is_placed, start = True, self.ledger.start
        if start is not None and (self.ended or self.epoch > start.epoch):
            self.ledger.start = None

    def refuse_left_out(self, is_sure: bool) -> None:
        """Raises ValueError if the loop has ended and left out a minibatch.

        ``is_sure``: the training loop has ended, too.
        """
        is_sure |= self._reads_ahead is False and self._is_read_here()
        if is_sure and self._handed and self._training_thread:
            raise left_out(self.epoch)

    def _is_read_here(self) -> bool:
        """Returns whether the thread that calls is the one that reads and trains."""
        return threading.get_ident() == self._handing_thread == self._training_thread


def left_out(epoch: int) -> ValueError:
    """Returns the error of a loop that has left out a minibatch of an epoch."""
    return ValueError(
        f"step() was not called for a minibatch of epoch {epoch}: remove an "
        "accumulation of your own, since step() accumulates; to skip one, "
        "loss = 0 * sum(p.sum() for p in model.parameters())"
    )
