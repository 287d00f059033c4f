"""The order of an update, and one replica's way through the steps.

All replicas make every update together. A replica that has no minibatch in a step joins
its update by the same call.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.data.account import Account
from variable_batch_size.step import checks
from variable_batch_size.step.attached import Attached, Update, log_line
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.scaling import Scaling
from variable_batch_size.step.settings import StepContext
from variable_batch_size.step.totals import StepTotals, hyperparameters, is_zero
from xla_replica import MemberLost, ReplicaError
from xla_replica.device.gradients import weak_hook

logger = logging.getLogger(__name__)


class UpdateLoop:
    """Accumulates minibatches, and makes an update whenever one is due.

    On a compiled backend a minibatch is one program and an update another one, whatever
    the batch sizes, and the second is the same on every replica;
    docs/architecture.md ("Two graphs") tells what keeps it so.

    Construction is collective: parameters are made equal to those of replica 0.

    Args:
        context: What its parts share.
        wrapper: The optimizer that the user holds, and that holds this object.

    Attributes:
        account: Where this optimizer is in the epochs.
        gradients, totals: What the step has accumulated.
        scaling: The rule, and its state.
        attached: What runs after every update.
        last_lrs: The effective learning rates of the last update; None before it.
        grad_norm: See `ElasticOptimizer`.
        num_seen: Minibatches since whoever counts them has set it to 0.
        num_minibatches: Those of all epochs that have ended.
        wrapper_name: The wrapper's class.
        is_stepping: Whether the inner optimizer may step, which is an error elsewhere.
        live: Meets other members, in a run in which they come and go; see `LiveRun`.
    """

    live: Any = None

    def __init__(self, context: StepContext, wrapper: Optimizer) -> None:
        self._context = context
        # Dropped, the wrapper is gone at once, and the inner optimizer may step itself.
        self._wrapper = weakref.proxy(wrapper)
        self.wrapper_name = type(wrapper).__name__
        self._is_lazy = context.replica.is_lazy
        self._is_weighted = context.settings.reduction == "sum"
        self.scaling = Scaling(context)
        self.totals = StepTotals(context)
        self.gradients = StepGradients(context)
        if not (self._is_lazy or context.exact or context.sharded):
            self.gradients.on_change = weak_hook(self._agree_on_trained)
        self.attached = Attached(context.noise)
        self.last_lrs: tuple[Any, ...] | None = None
        self.grad_norm: torch.Tensor | None = None
        self.num_seen = 0
        self._has_sums = False  # of the update under way, all that it needs of others
        self.num_minibatches = 0
        self._hyperparameters: tuple[Any, ...] | None = None  # None: they may change
        self.is_stepping = False
        inner: Any = context.inner  # whose own step() is an error from now on
        if not hasattr(inner, "_update_loop"):
            inner.register_step_pre_hook(_refuse_own_step)
        inner._update_loop = weakref.ref(self)  # the newest, if there are several
        inner.exact = context.exact  # for whoever has only the inner one
        sampler, key = context.sampler, id(context.parameters()[0])
        if context.exact:
            self.account: Account = context.exact.account(sampler, key)
        else:
            self.account = Account(sampler.ledger, key)
        self.account.owner = weakref.proxy(self)
        self._check_padding()
        self.gradients.prepare_backward(self.account)

    # --- epochs ---------------------------------------------------------------------

    def restart(self) -> None:
        """Forgets what was accumulated before the sampler was placed elsewhere."""
        self._check_padding()
        self.num_seen = 0
        self._forget()
        self.gradients.prepare_backward(self.account)
        self._hyperparameters = None

    def _forget(self) -> None:
        """Forgets what has been accumulated."""
        self.gradients.clear()
        self.totals.clear()

    def begin_epoch(self, epoch: int) -> None:
        """Goes to the first step of an epoch.

        Raises ReplicaError where other replicas would not begin it too.
        """
        account, context = self.account, self._context
        self.refuse_waiting()
        self._check_live()
        if self.live:
            self.live.check_attached()
            if account.announced and account.epoch != epoch:
                self._end_epoch(epoch)
        if account.announced and account.epoch == epoch and not account.has_run:
            return  # a second call: idle steps are joined already
        if account.begin(epoch):
            self._forget()
        self._check_padding()
        self.gradients.refresh()
        self._hyperparameters = hyperparameters(context.inner.param_groups)
        self.gradients.prepare_backward(account)

    def _check_padding(self) -> None:
        """Raises ValueError if the sampler pads the steps of another wrapper."""
        if self.account.plan.padded != self._context.sharded:
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
            raise ReplicaError(text, self._context.replica.rank)
        logger.warning(text)

    # --- a minibatch ----------------------------------------------------------------

    def end_minibatch(self, weight: Any) -> int:
        """Accumulates a minibatch; returns the number of updates made after it.

        Args:
            weight: As the user gives it to `ElasticOptimizer.step`.
        """
        if self.account.is_waiting:
            self.refuse_waiting()
        account, counted = self.follow_sampler(), None
        if self._is_weighted or weight is not None:
            counted = self._weigh(weight)
        if account.number == account.plan.start_step:
            checks.refuse_other_accumulation()
        is_empty = weight is not None and is_zero(weight)
        self.gradients.accept(account.substep, counted, needs_backward=not is_empty)
        if self._is_weighted:
            self.totals.add(counted)
        self._check_hyperparameters()
        self.num_seen += not account.is_padding
        self.num_minibatches += 1
        is_last = account.train()
        if self._is_lazy:  # the minibatch graph ends here, on every replica alike
            self._context.replica.sync()
        if is_last and len(account.ledger.accounts) > 1:
            return self.update_with_others()
        if is_last:
            return self.update()
        self._hyperparameters = hyperparameters(self._context.inner.param_groups)
        self.gradients.prepare_backward(account)
        return 0

    def follow_sampler(self) -> Account:
        """Goes to the epoch of the minibatch that is trained next; checks that."""
        if self.account.check():
            self._check_padding()
            self._hyperparameters = None  # they may change between epochs
        return self.account

    def _weigh(self, weight: Any) -> torch.Tensor:
        """Returns what the next minibatch weighs; some of it may be padding."""
        account = self.account
        if self._context.sampler.schedule.pad_minibatches:
            num_real = account.num_real_samples
            self.totals.check_weights_read(num_real)
            weight = num_real if weight is None else weight
        is_padding = self._is_weighted and account.is_padding
        return self.totals.on_device(0 if is_padding else weight)

    def _check_hyperparameters(self) -> None:
        """Raises ReplicaError if a change just now was not seen by all replicas.

        Replicas run the user's loop body different numbers of times: once per
        minibatch, and not at all in steps in which they are idle. What looks right
        from here and is not, the ballots find.
        """
        account, context = self.account, self._context
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

    # --- an update ------------------------------------------------------------------

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
            self._hyperparameters = hyperparameters(self._context.inner.param_groups)
            return 0
        for account in accounts:
            account.is_waiting = False
            if account is not own:  # since its own step()
                account.owner.refuse_changes()
        found = [(each, each.owner.update(ends=False)) for each in accounts]
        for account, update in found:
            if isinstance(update, Update):
                account.owner.end_update(update)
        [number] = [update for account, update in found if account is own]
        return 1 if isinstance(number, Update) else number

    def refuse_changes(self) -> None:
        """Raises ReplicaError or ValueError if what is trained has changed."""
        self._check_hyperparameters()
        self.gradients.refuse_changes()

    def update(self, ends: bool = True) -> Any:
        """Makes the update of the step under way on all replicas; returns 1.

        What needs a peer comes first and changes nothing that lasts; then the weights
        and the place change. If an exception ends the update, the step is lost and
        gradients are zero. Returns 0 if all replicas are to run the step again. Without
        ``ends`` returns the update, after which nothing that is attached has run.
        """
        context, account = self._context, self.account
        step: Any = account.now
        self._has_sums = False
        if self.live is None and context.replica.is_live:
            self._check_live()
        if step.idle:
            self.gradients.use_zeros()
            if context.exact:  # so that tensors are of the age that others' have
                self._forget()
            context.replica.sync()  # keeps what is pending out of the update
        changed: tuple[Any, ...] | None = ()
        is_lost = False
        try:
            with torch.no_grad():
                changed = self._change_weights()
        except MemberLost as error:
            if self._has_sums:  # of a step hook, after which weights may have changed
                raise
            self._note_loss(error)
            changed, is_lost = None, True
        finally:
            if changed is not None:
                account.commit()
            self.gradients.clear()
            self.totals.clear()
            if self._is_lazy:
                context.replica.sync()
        if not changed:
            account.ledger.redeal()
            self.attached.drop_step()
            self.gradients.prepare_backward(account)
            return self._resume() if is_lost else 0
        self.last_lrs, weight = changed
        update = Update(
            epoch=step.epoch,
            step=step.global_step,
            batch_size=step.batch_size,
            minibatch_size=step.minibatch_size,
            lr=self.last_lrs,
            idle=step.idle,
            ends_epoch=step.ends_epoch,
            weight=weight,
        )
        self.attached.num_done = 0
        if not ends:
            return update
        self.end_update(update)
        return 1

    def end_update(self, update: Update) -> None:
        """Runs what is attached, and what else follows an update."""
        context = self._context
        while not self.attached.is_empty:
            try:
                self.attached.run(update)
                break
            except MemberLost as error:
                self._note_loss(error)
            self.live.resume(update)
        log_steps = context.settings.log_steps
        if log_steps and update.step % log_steps == 0:
            self._log(update)
        if self.live:
            meet, leaves = self.totals.agreement.change_agreed()
            if leaves:
                self.live.leave()
            if meet:
                self.live.resume()
        self.gradients.refresh()  # functions may have frozen or unfrozen some
        self._hyperparameters = hyperparameters(context.inner.param_groups)
        self.gradients.prepare_backward(self.account)

    # --- members that come and go ---------------------------------------------------

    def _check_live(self) -> None:
        """Raises ReplicaError unless this member of a live run has joined it."""
        if self._context.replica.is_live and self.live is None:
            raise ReplicaError(
                "in a live run a member joins in Checkpointer.load(), where it gets "
                "the state of the others: call it before optimizer.set_epoch"
            )

    def _end_epoch(self, next_epoch: int) -> None:
        """Waits for the others at the end of an epoch of a live run.

        Otherwise a member that is one step behind would receive a state of the next
        epoch while its loop is still in this one. A member that dies here may already
        have let others pass.
        """
        while self.account.epoch != next_epoch:
            try:
                self._context.replica.barrier()
                return
            except MemberLost as error:
                self._note_loss(error)
            self.live.resume()

    def _note_loss(self, loss: MemberLost) -> None:
        """Tells of a loss; raises it unless there is a way to go on.

        Members meet only after the exception was handled: until then its traceback
        keeps the group open, and the others wait for it.
        """
        if self.live is None:
            raise loss
        logger.warning(f"members meet: {loss}")

    def _resume(self) -> int:
        """Meets the other members in mid-step; returns the updates that it has missed.

        They were made by a member that had its sums, and are received with its state.
        """
        before = self.account.global_step
        update = self.live.resume()
        if update is not None:
            self.end_update(update)
        return self.account.global_step - before

    def deal_to(self, rank: int, num_replicas: int) -> None:
        """Goes on as another replica, at the step that the sampler or a state has."""
        account = self.account
        account.ledger.move(rank, num_replicas, account.cursor)
        self._forget()
        self._hyperparameters = None
        self.gradients.prepare_backward(account)

    def _change_weights(self) -> tuple[tuple[Any, ...], Any] | None:
        """Sums over replicas, divides, measures, clips, scales and steps.

        It is one program on every replica, for every batch size; two, between which the
        host looks at the sums, if these are exact. Returns the effective learning rate
        of each parameter group, and the step's weight; None if sums do not fit.
        """
        context, settings = self._context, self._context.settings
        step: Any = self.account.now
        # Prepare: changing numbers go to the device before the collective is traced.
        common = [self.gradients.trained, *(self.attached.names() if self.live else ())]
        totals = self.totals.to_sum(step, self.scaling, common)
        divisor: Any = None if self._is_weighted else step.num_minibatches
        if self._is_lazy and not self._is_weighted:
            divisor = context.scalars.get("divisor", divisor)
        ratio: Any = None
        if settings.ref_weight is None:
            ratio = step.batch_size / (settings.ref_batchsize or 1)
        self.scaling.prepare(ratio)
        # Sum, and look whether replicas agree.
        if self._is_lazy:
            self.gradients.narrow()
        self.gradients.sums.sum_(totals, divisor)
        weight, divisor = self.totals.take()
        if context.exact:
            if not context.exact.accept_step(step):
                return None
            self._has_sums = True
            context.exact.commit()  # before the hooks of the inner optimizer's step
        # Commit.
        if self._is_weighted:
            if is_zero(weight):
                self.gradients.refuse_nonzero()
            self.gradients.sums.divide_(divisor)
        if settings.ref_weight is not None:
            ratio = weight / settings.ref_weight
        noise = context.noise
        factors = noise.update(weight) if noise else None
        if settings.max_grad_norm is not None:
            self.grad_norm = self.gradients.clip_(settings.max_grad_norm)
        self.is_stepping = True
        try:
            lrs = self.scaling.step(factors, ratio)
        finally:
            self.is_stepping = False
        self._wrapper._opt_called = True  # torch's schedulers look before their step
        return lrs, weight

    def _agree_on_trained(self) -> None:
        """Raises ReplicaError unless all replicas train other parameters from now on.

        One that did so alone would sum tensors of other sizes, which gloo aborts the
        process for. So it takes part in the next sum of its peers as it was, or in one
        that all make for this; the ballots differ in the first case.
        """
        if self.totals.agreement is not None:
            totals = self.totals.of_nothing([self.gradients.trained])
            self.gradients.sums.sum_zeros(totals)
            self.totals.agreement.count(totals[0])
            self.totals.agreement.check()

    def _log(self, update: Update) -> None:
        """Logs one line on replica 0; every replica reads its device."""
        self.check_agreement()
        line = log_line(update, self._context.noise, self._context.replica)
        if self._context.replica.is_primary:
            logger.info(line)

    def check_agreement(self) -> None:
        """Raises ReplicaError if replicas ever differed; reads the device."""
        if self.totals.agreement is not None:
            self.totals.agreement.check()


def _refuse_own_step(inner: Any, *_: Any) -> None:
    """Runs before every step of an inner optimizer; raises RuntimeError if it is own.

    A module's function and not a method, so that the hook keeps no loop alive.
    """
    loop = inner._update_loop()
    if loop is not None and not loop.is_stepping:
        raise RuntimeError(
            f"step() of the {type(inner).__name__} that a {loop.wrapper_name} wraps "
            "was called: it would use partial sums of gradients, on this replica "
            "alone, and the unscaled learning rate. Call step() of the wrapper instead"
        )
