"""One update. All replicas make every one together, also those without a minibatch.

A step is a transaction. What needs a peer comes first and changes nothing that lasts:
an exception there throws the step away, and its minibatches are dealt once more. From
the commit on no peer is needed, and the step counts as done, also if that raises.

On a compiled backend a minibatch is one program and an update another one, whatever the
batch sizes, and the second is the same on every replica; docs/architecture.md ("Two
graphs") tells what keeps it so.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.data.account import Account
from variable_batch_size.data.schedule import Step
from variable_batch_size.step import checks
from variable_batch_size.step.attached import Attached, Update, log_line
from variable_batch_size.step.ballots import Ballots
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.parts import Weights, is_zero
from variable_batch_size.step.scaling import Scaling, hyperparameters
from variable_batch_size.step.settings import StepContext
from xla_replica import ReplicaError
from xla_replica.device.gradients import weak_hook

logger = logging.getLogger(__name__)


class RunAgain(Exception):
    """A step has shown that it must be run again, on every replica alike."""


class Updates:
    """Accumulates minibatches, and makes an update whenever one is due.

    Args:
        context: What its parts share.
        wrapper: The optimizer that the user holds, and that holds this object.
        account: Where that is in the epochs.
        gradients: What the step has accumulated.
        scaling: The rule, and its state.
        parts: What else counts if the step is committed, by name.

    Attributes:
        attached: What runs after every update.
        made: The last update; what is attached may not have run after it yet.
        num_seen: Minibatches since whoever counts them has set it to 0.
        num_minibatches: Those of all epochs that have ended.
        is_stepping: Whether the inner optimizer may step, which is an error elsewhere.
    """

    def __init__(
        self,
        context: StepContext,
        wrapper: Optimizer,
        account: Account,
        gradients: StepGradients,
        scaling: Scaling,
        parts: Mapping[str, Any],
    ) -> None:
        self.context, self.account, self.gradients = context, account, gradients
        self.scaling, self.parts = scaling, parts
        # Dropped, the wrapper is gone at once, and the inner optimizer may step itself.
        self._wrapper = weakref.proxy(wrapper)
        self.wrapper_name = type(wrapper).__name__
        self._is_lazy = context.replica.is_lazy
        # Ends the graph of a compiled backend; elsewhere nothing.
        self._cut: Any = context.replica.sync if self._is_lazy else tuple
        self.ballots: Ballots | None = parts.get("ballots")
        self.weights: Weights | None = parts.get("weights")
        if self.ballots and not (self._is_lazy or context.sharded):
            self.gradients.on_change = weak_hook(self._agree_on_trained)
        self.attached = Attached(context.noise)
        self.made: Update | None = None
        self.num_seen = self.num_minibatches = 0
        self._hyperparameters: tuple[Any, ...] | None = None  # None: they may change
        self.is_stepping = False
        inner: Any = context.inner  # whose own step() is an error from now on
        if not hasattr(inner, "_updates"):
            inner.register_step_pre_hook(_refuse_own_step)
        inner._updates = weakref.ref(self)  # the newest, if there are several
        inner.exact = context.exact  # for whoever has only the inner one
        account.owner = weakref.proxy(self)
        self._check_padding()
        self._begin_minibatch()

    # --- epochs ---------------------------------------------------------------------

    def restart(self) -> None:
        """Forgets what was accumulated before the sampler was placed elsewhere."""
        self._check_padding()
        self.num_seen = 0
        self.clear()
        self._begin_minibatch()
        self._hyperparameters = None

    def begin_epoch(self, epoch: int) -> None:
        """Goes to the first step of an epoch.

        Raises ReplicaError where other replicas would not begin it too.
        """
        self.refuse_waiting()
        is_lost = self.account.begin(epoch)
        if is_lost is None:
            return
        if is_lost:
            self.clear()
        self._check_padding()
        self.gradients.refresh()
        self._hyperparameters = hyperparameters(self.context.inner.param_groups)
        self._begin_minibatch()

    def _check_padding(self) -> None:
        """Raises ValueError if the sampler pads the steps of another wrapper."""
        if self.account.plan.padded != self.context.sharded:
            raise ValueError(
                "sharded and whole parameters share a sampler: give each one its own"
            )

    def check_attach(self) -> None:
        """Raises ReplicaError if what is attached now would miss updates here alone.

        An epoch in which this replica is always idle may be over or have just begun,
        so it gets a warning.
        """
        account, plan = self.account, self.account.plan
        num_made = account.number - plan.start_step
        if not (account.announced and num_made and plan.has_idle_replicas):
            return
        if account.has_run and account.ended:
            return
        text = (
            f"attach: this replica is {num_made} updates into epoch {plan.epoch} "
            "already, those that set_epoch has joined included, and other replicas "
            "may not be: what is attached would run different numbers of times. Call "
            "attach before optimizer.set_epoch"
        )
        if not account.ended:
            raise ReplicaError(text, self.context.replica.rank)
        logger.warning(text)

    # --- a minibatch ----------------------------------------------------------------

    def end_minibatch(self, weight: Any) -> int:
        """Accumulates a minibatch; returns the number of updates made after it.

        Args:
            weight: As the user gives it to `ElasticOptimizer.step`.
        """
        account = self.check_minibatch()
        counted = None
        if self.weights is not None:
            counted = self.weights.of_minibatch(weight, account)
        elif weight is not None:
            raise TypeError(
                "step(weight=...) needs reduction='sum': build the optimizer with it, "
                "and let the loss be the sum over tokens, not their mean"
            )
        is_empty = weight is not None and is_zero(weight)
        self.gradients.check(account.substep, needs_backward=not is_empty)
        for part in self.parts.values():
            part.end_minibatch(counted)
        self.gradients.accept(account.substep)
        if account.substep or account.plan.has_idle_replicas:
            self._check_hyperparameters()
        self.num_seen += not (account.plan.padded and account.is_padding)
        self.num_minibatches += 1
        is_last = account.train()
        self._cut()  # a minibatch's graph ends here, on every replica alike
        if is_last:
            is_alone = len(account.ledger.accounts) == 1
            return self.update() if is_alone else self.update_with_others()
        self._hyperparameters = hyperparameters(self.context.inner.param_groups)
        self._begin_minibatch()
        return 0

    def check_minibatch(self) -> Account:
        """Goes to the epoch of the minibatch that is trained next, which is checked."""
        if self.account.is_waiting:
            self.refuse_waiting()
        if self.account.check():
            self._check_padding()
            self._hyperparameters = None  # they may change between epochs
        if self.account.number == self.account.plan.start_step:
            checks.refuse_other_accumulation()
        return self.account

    def _begin_minibatch(self) -> None:
        """Prepares for the next backward pass."""
        self.gradients.prepare_backward(self.account)
        for part in self.parts.values():
            part.begin_minibatch(self.account.now)

    def _check_hyperparameters(self) -> None:
        """Raises ReplicaError if a change just now was not seen by all replicas.

        Replicas run the user's loop body different numbers of times: once per
        minibatch, and not at all in steps in which they are idle. What looks right
        from here and is not, the ballots find.
        """
        account, context = self.account, self.context
        if self._hyperparameters is None:
            return
        if account.substep:  # on one replica, too: more of them would do otherwise
            where = f"within step {account.number}"
            why = "replicas may accumulate different numbers of minibatches"
        elif account.plan.has_idle_replicas and not context.settings.lockstep:
            where = "between two updates"
            why = "idle replicas join updates without running your code"
        else:
            return
        if self._hyperparameters == hyperparameters(context.inner.param_groups):
            return
        raise ReplicaError(
            "the learning rate or another hyperparameter changed "
            f"{where} of epoch {account.epoch}. There {why}: call "
            "optimizer.attach(scheduler) once in place of scheduler.step() in the "
            "loop, or change it between epochs, before optimizer.set_epoch",
            context.replica.rank,
        )

    # --- several optimizers of one sampler ------------------------------------------

    def refuse_waiting(self) -> None:
        """Raises ValueError if other optimizers have not ended the step yet."""
        if self.account.is_waiting:
            raise ValueError(
                f"one of {len(self.account.ledger.accounts)} optimizers of this "
                "sampler has ended a step, and others have not: call step() of each "
                "for every minibatch, and drop (del) one that is not used any more"
            )

    def update_with_others(self) -> int:
        """Makes the updates of all optimizers of the sampler, when the last comes here.

        So all backward passes of the step are over; what is attached runs, and saves,
        after all updates. Returns the number of updates of each, 0 before.
        """
        own, accounts = self.account, [*self.account.ledger.accounts.values()]
        own.is_waiting = True
        if not all(account.is_waiting for account in accounts):
            self._hyperparameters = hyperparameters(self.context.inner.param_groups)
            self.gradients.start_records()
            return 0
        for account in accounts:
            account.is_waiting = False
            if account is not own:  # since its own step()
                account.owner.refuse_changes()
        numbers = [account.owner.update(is_alone=False) for account in accounts]
        for account, number in zip(accounts, numbers):
            if number:
                account.owner.after(account.owner.made)
        return numbers[accounts.index(own)]

    def refuse_changes(self) -> None:
        """Raises ReplicaError or ValueError if what is trained has changed."""
        self._check_hyperparameters()
        self.gradients.refuse_changes()

    # --- an update ------------------------------------------------------------------

    def update(self, is_alone: bool = True) -> int:
        """Makes the update of the step under way, on all replicas.

        Returns how many were made; 0 if all replicas are to run the step again, where
        members are lost perhaps 1, which others have made.

        Args:
            is_alone: Whether what is attached runs now; else `made` is for `after`.
        """
        step: Any = self.account.now
        parts, is_made = self.parts.values(), False
        with torch.no_grad():
            try:
                # 1. Prepare: what changes goes to the device before a sum is traced.
                if step.idle:
                    self.use_zeros()
                for part in parts:
                    part.prepare(step)
                self.scaling.prepare(step)
                # 2. Sum over replicas: gradients, and what parts have with them.
                divisor: Any = None if self.weights else step.num_minibatches
                if divisor and self._is_lazy:
                    divisor = self.context.scalars.get("divisor", divisor)
                others = [each for part in parts for each in part.tensors()]
                self.gradients.sum_(others, divisor)
                # 3. Look, whether replicas agree, where that is free.
                for part in parts:
                    part.look(step)
                is_made = True
            except Exception as error:
                self.rollback(error)
            if is_made:
                # 4. Commit: the weights change, and the step is done.
                try:
                    lrs = self.commit(step)
                finally:
                    self.account.commit()
                    self.clear()
        if not is_made:
            return self.redeal()
        # 5. After: schedulers and functions that are attached.
        self.attached.num_done = 0
        self.made = Update(
            epoch=step.epoch,
            step=step.global_step,
            batch_size=step.batch_size,
            minibatch_size=step.minibatch_size,
            lr=lrs,
            idle=step.idle,
            ends_epoch=step.ends_epoch,
            weight=self.weights.weight if self.weights else None,
        )
        if is_alone:
            self.after(self.made)
        return 1

    def use_zeros(self) -> None:
        """Brings no minibatch to the update."""
        self.gradients.use_zeros()
        if self.gradients.is_aged:
            self.clear()
        self.context.replica.sync()  # keeps what is pending out of the update

    def commit(self, step: Step) -> tuple[Any, ...]:
        """Changes the weights; returns the effective learning rates."""
        for part in self.parts.values():
            part.commit(step)
        gains = getattr(self.parts.get("noise"), "gains", None)
        ratio = getattr(self.weights, "ratio", None)
        self.is_stepping = True
        try:
            lrs = self.scaling.step(gains, ratio)
        finally:
            self.is_stepping = False
        self._wrapper._opt_called = True  # torch's schedulers look before their step
        return lrs

    def rollback(self, error: Exception) -> None:
        """Forgets the step; raises the error unless it is to be run again."""
        self.clear()
        self.account.ledger.redeal()
        self.attached.drop_step()
        if not isinstance(error, RunAgain):
            raise error

    def redeal(self) -> int:
        """Begins a step that was thrown away; returns the updates that others made."""
        self._begin_minibatch()
        return 0

    def after(self, update: Update) -> None:
        """Runs what follows an update, and prepares the next minibatch."""
        if not self.attached.is_empty:
            self.run_attached(update)
            self.gradients.refresh()  # functions may have frozen or unfrozen some
        log_steps = self.context.settings.log_steps
        if log_steps and update.step % log_steps == 0:
            self._log(update)
        self._hyperparameters = hyperparameters(self.context.inner.param_groups)
        self._begin_minibatch()

    def run_attached(self, update: Update) -> None:
        """Runs what is attached."""
        self.attached.run(update)

    def clear(self) -> None:
        """Forgets the minibatches of the step, in the sequence of `end_minibatch`."""
        with torch.no_grad():
            for part in self.parts.values():
                part.clear()
            self.gradients.clear()
        self._cut()

    def _agree_on_trained(self) -> None:
        """Raises ReplicaError unless all replicas train other parameters from now on.

        One that did so alone would sum tensors of other sizes, which gloo aborts the
        process for. So it takes part in the next sum of its peers as it was, or in one
        that all make for this; the ballots differ in the first case.
        """
        ballots, others = self.ballots, []
        assert ballots is not None
        ballots.cast_other((self.gradients.trained,))
        for part in self.parts.values():
            zeros = [torch.zeros_like(each) for each in part.tensors()]
            others += ballots.tensors() if part is ballots else zeros
        self.gradients.sums.sum_zeros(others)
        ballots.look()
        ballots.check()

    def _log(self, update: Update) -> None:
        """Logs one line on replica 0; every replica reads its device."""
        self.check_agreement()
        line = log_line(update, self.context.noise, self.context.replica)
        if self.context.replica.is_primary:
            logger.info(line)

    def check_agreement(self) -> None:
        """Raises ReplicaError if replicas ever differed; reads the device."""
        if self.ballots is not None:
            self.ballots.check()


def _refuse_own_step(inner: Any, *_: Any) -> None:
    """Runs before every step of an inner optimizer; raises RuntimeError if it is own.

    A module's function and not a method, so that the hook keeps no updates alive.
    """
    updates = inner._updates()
    if updates is not None and not updates.is_stepping:
        raise RuntimeError(
            f"step() of the {type(inner).__name__} that a {updates.wrapper_name} wraps "
            "was called: it would use partial sums of gradients, on this replica "
            "alone, and the unscaled learning rate. Call step() of the wrapper instead"
        )
