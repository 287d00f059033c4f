"""One replica's way through the steps, with its minibatches or without any.

All replicas make every update together. There are two ways through a step in which a
replica has no minibatch: it joins the update at once, in the call that ends the step
before (an idle step); or, in lockstep, the caller joins it when it comes to that step.
"""

from __future__ import annotations

import logging
from typing import Any

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.step import checks
from variable_batch_size.step.attached import Attached, Update, log_line
from variable_batch_size.step.programs import StepPrograms
from variable_batch_size.step.settings import Settings
from variable_batch_size.step.step_counter import StepCounter
from variable_batch_size.step.weights import is_zero
from xla_replica import Replica, ReplicaError

logger = logging.getLogger(__name__)


class ReplicaSteps:
    """Counts minibatches, and makes an update whenever one is due.

    Args:
        sampler: The sampler that feeds the replica.
        settings: Those of the wrapper.
        replica: The replica that the caller runs in.
        programs: What runs on the device.
        attached: What runs after every update.
        noise: What log lines tell of, beside the update.
        sharded: Whether parameters are, so that plans have padding in place of idle
            steps.

    Attributes:
        counter: The epoch, step and substep under way.
        last_lrs: The effective learning rates of the last update; None before it.
        num_seen: Minibatches since whoever counts them has set it to 0.
    """

    def __init__(
        self,
        sampler: CustomSampler,
        settings: Settings,
        replica: Replica,
        programs: StepPrograms,
        attached: Attached,
        noise: NoiseMeter | None,
        sharded: bool,
    ) -> None:
        self._sampler = sampler
        self._settings = settings
        self._replica = replica
        self._programs = programs
        self._attached = attached
        self._noise = noise
        self._sharded = sharded
        self.last_lrs: tuple[Any, ...] | None = None
        self.num_seen = 0
        self._num_minibatches = 0  # of all epochs
        self.counter = StepCounter(sampler.plan, replica.rank, announced=False)
        self._expect()

    def restart(self) -> None:
        """Continues at the sampler's place, without what was accumulated."""
        self.counter = StepCounter(
            self._sampler.plan, self._replica.rank, announced=False
        )
        self.num_seen = 0
        self._programs.discard()
        self._expect()
        self._programs.agreement.allow_change()

    def begin_epoch(self, epoch: int) -> int:
        """Begins an epoch; returns how many idle steps were joined.

        Raises ReplicaError where other replicas would not begin it too.
        """
        counter, rank = self.counter, self._replica.rank
        is_alone = self._replica.num_replicas == 1
        if counter.announced and counter.plan.epoch == epoch:
            if not counter.begun:
                return 0  # a second call: idle steps are joined already
            again = f"epoch {epoch} has been trained; another pass needs another number"
            if counter.ended and not is_alone:
                # One that idled all epoch takes the repetition for a second call.
                raise ReplicaError(f"{again}, on several replicas", rank)
            if counter.ended:
                logger.warning(f"{again}: this one has the same order and steps")
        plan = self._sampler.plan_of(epoch)
        if counter.begun and not counter.ended:
            left = (
                f"epoch {counter.plan.epoch} is abandoned after {counter.cursor.step} "
                f"of {counter.plan.num_steps} steps"
            )
            remedy = (
                "run every minibatch of the sampler, and call step() after each of "
                "them: it accumulates by itself. To train less, shorten the trace"
            )
            if not is_alone:
                raise ReplicaError(
                    f"{left}, and the other replicas would wait for this one: {remedy}",
                    rank,
                )
            logger.warning(f"{left}: {remedy}")
            self._programs.discard()
        self.counter = StepCounter(plan, rank, announced=True)
        self._programs.note_parameters()
        return self._join_idle_steps()

    def end_minibatch(self, weight: Any) -> int:
        """Takes in a minibatch, and returns the number of updates made after it."""
        counter, programs = self.counter.follow(self._sampler.plan), self._programs
        if counter is not self.counter:
            # Hyperparameters may change between epochs.
            programs.agreement.allow_change()
        self.counter = counter
        on_device = programs.weigh(counter, weight)
        checks.check_yielded(self._sampler, self._num_minibatches + 1)
        programs.accumulate(counter, on_device, needs_backward=not is_zero(weight))
        self.num_seen += not counter.is_padding
        self._num_minibatches += 1
        is_last = counter.count_minibatch()
        self._replica.sync()  # the minibatch graph ends here, on every replica alike
        if is_last:
            self._update()
            return 1 + self._join_idle_steps()
        programs.remember()
        self._expect()
        return 0

    def join(self) -> int:
        """Takes part in a step in which this replica has no minibatch; returns 1."""
        self._programs.stand_in()
        self._update()
        self._expect()
        return 1

    def _join_idle_steps(self) -> int:
        """Joins the steps that come next without a minibatch, unless in lockstep."""
        joined = 0
        self._expect()
        while self.counter.idle and not self._settings.lockstep:
            joined += self.join()
        return joined

    def _expect(self) -> None:
        """Prepares for the next minibatch, if there is one."""
        if self.counter.plan.padded != self._sharded:
            raise ValueError(
                "a wrapper of sharded parameters and one of whole ones share a "
                "sampler, but need different numbers of minibatches: give each its own"
            )
        self._programs.expect(self.counter)

    def _update(self) -> None:
        """Makes the update of the step under way, and runs what is attached.

        If an exception ends the update, the step is lost and gradients are zero.
        """
        counter, plan, programs = self.counter, self.counter.plan, self._programs
        batch_size, step, idle = counter.batch_size, counter.cursor.step, counter.idle
        try:
            self.last_lrs, weight = programs.update(counter)
        finally:
            counter.next_step()  # whatever became of this update
            programs.discard()
            self._replica.sync()
        self._sampler.commit(plan.epoch, step + 1)
        update = Update(
            epoch=plan.epoch,
            step=plan.first_step + step,
            batch_size=batch_size,
            minibatch_size=plan.minibatch_size,
            lr=self.last_lrs,
            idle=idle,
            ends_epoch=step + 1 == plan.num_steps,
            weight=weight,
        )
        self._attached.run(update)
        programs.note_parameters()  # callbacks may have frozen or unfrozen some
        log_steps = self._settings.log_steps
        if log_steps and update.step % log_steps == 0:
            self._log(update)

    def _log(self, update: Update) -> None:
        """Logs one line on replica 0; every replica reads its device."""
        self._programs.agreement.check()
        line = log_line(update, self._noise, self._replica)
        if self._replica.is_primary:
            logger.info(line)
