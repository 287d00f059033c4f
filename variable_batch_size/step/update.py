"""One update, in which every replica takes part, also one without a minibatch.

A step is a transaction. What needs a peer comes first and changes nothing that lasts:
an exception there throws the step away, and its minibatches are dealt anew. The commit
needs no peer, and from there on the step counts as done, even if something raises. What
keeps it two programs on a compiled backend: docs/architecture.md ("Two graphs").
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from variable_batch_size.data.account import Account
from variable_batch_size.step.attached import Attached, Update, log
from variable_batch_size.step.checks import refuse_other_accumulation
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.parts import Ballots, Weights, is_zero
from variable_batch_size.step.run import Run
from variable_batch_size.step.scaling import Scaling
from variable_batch_size.step.together import update_together


class RunAgain(Exception):
    """A step has shown that it must be run again, on every replica alike."""


@dataclasses.dataclass(eq=False)
class Updates:
    """Accumulates minibatches, and makes an update whenever one is due.

    Attributes:
        run: The arguments of the wrapper.
        account: Where the wrapper is in the epochs.
        gradients: Those that the step has accumulated.
        scaling: The rule, and its state.
        parts: Further state of a step, by name.
        attached: Callbacks that run after every update.
        made: The last update; its callbacks may not have run yet.
        num_seen: Minibatches, without padding, since this was last set to 0.
    """

    run: Run
    account: Account
    gradients: StepGradients
    scaling: Scaling
    parts: Mapping[str, Any]
    made: Update | None = None
    num_seen: int = 0

    def __post_init__(self) -> None:
        self._is_lazy = self.run.replica.is_lazy
        # Ends the graph of a compiled backend; elsewhere nothing.
        self._cut: Any = self.run.replica.sync if self._is_lazy else tuple
        self.ballots: Ballots | None = self.parts.get("ballots")
        self.weights: Weights | None = self.parts.get("weights")
        self.attached = Attached(self.run)
        self.account.owner = weakref.proxy(self)
        self.begin_minibatch()

    def end_minibatch(self, weight: Any) -> int:
        """Accumulates a minibatch; returns the number of updates made after it.

        ``weight`` is what the user gives to `ElasticOptimizer.step`.
        """
        account, counted = self.account, None
        account.check()
        if account.number == account.plan.start_step:
            refuse_other_accumulation()
        if self.weights is not None:
            counted = self.weights.of_minibatch(weight, account)
        is_empty = weight is not None and is_zero(weight)
        self.gradients.check(account.substep, needs_backward=not is_empty)
        for part in self.parts.values():
            part.end_minibatch(counted)
        self.gradients.accept(account.substep)
        if account.substep or account.plan.has_idle_replicas:
            self.scaling.refuse_changes(account)
        self.num_seen += not (account.plan.padded and account.is_padding)
        is_last = account.train()
        self._cut()  # a minibatch's graph ends here, on every replica alike
        if is_last:
            is_alone = len(account.ledger.accounts) == 1
            return self.update() if is_alone else update_together(account)
        self.begin_minibatch()
        return 0

    def begin_minibatch(self) -> None:
        """Prepares for the next backward pass."""
        self.scaling.note_given(self.account)
        self.gradients.prepare_backward(self.account)
        for part in self.parts.values():
            part.begin_minibatch(self.account.now)

    def update(self, is_alone: bool = True) -> int:
        """Makes the update of the step under way, on all replicas; returns 1.

        Or 0 if all run the step again; a live run 1 if other members have made it.
        Unless it ``is_alone``, the caller then calls `after` with `made`.
        """
        step: Any = self.account.now
        parts, lrs = self.parts.values(), None
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
                others = [each for part in parts for each in part.tensors()]
                if self._is_lazy:
                    divisor = divisor and self.run.scalars.get("divisor", divisor)
                    self.gradients.narrow()
                self.gradients.sums.sum_(others, divisor)
                # 3. Look, whether replicas agree, where that is free.
                for part in parts:
                    part.look(step)
            except Exception as error:
                self.rollback(error)
            else:
                # 4. Commit: the weights change, and the step is done.
                try:
                    for part in parts:
                        part.commit(step)
                    gains = getattr(self.parts.get("noise"), "gains", None)
                    lrs = self.scaling.step(gains, getattr(self.weights, "ratio", None))
                finally:
                    self.account.commit()
                    self.clear()
        if lrs is None:
            return self.begin_again()
        # 5. After: schedulers and functions that are attached.
        self.attached.num_done = 0
        self.made = Update(
            step.epoch, step.global_step, step.batch_size, step.minibatch_size, lrs,
            step.idle, step.ends_epoch, getattr(self.weights, "weight", None),
        )  # fmt: skip
        if is_alone:
            self.after(self.made)
        return 1

    def use_zeros(self) -> None:
        """Takes part with gradients of zero, where there was no minibatch."""
        self.gradients.refresh()
        self.gradients.sums.use_zeros()
        if self.gradients.is_aged:
            self.clear()
        self.run.replica.sync()  # keeps what is pending out of the update

    def rollback(self, error: Exception) -> None:
        """Forgets the step; raises the error unless it is to be run again."""
        self.clear()
        self.account.ledger.redeal()
        self.attached.drop_step()
        if not isinstance(error, RunAgain):
            raise error

    def begin_again(self) -> int:
        """Begins a step anew; returns how many updates others have made meanwhile."""
        self.begin_minibatch()
        return 0

    def after(self, update: Update) -> None:
        """Runs what follows an update, and prepares the next minibatch."""
        if self.attached.callbacks:
            self.attached.run(update)
            self.gradients.refresh()  # functions may have frozen or unfrozen some
        if self.run.log_steps and update.step % self.run.log_steps == 0:
            if self.ballots is not None:
                self.ballots.check()
            log(update, self.run)
        self.begin_minibatch()

    def clear(self) -> None:
        """Forgets the step's minibatches: what parts have of them, then gradients."""
        with torch.no_grad():
            for part in self.parts.values():
                part.clear()
            self.gradients.clear()
        self._cut()
