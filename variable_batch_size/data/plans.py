"""The plans of a sampler's epochs, and how far the optimizers have come in them."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from variable_batch_size.data.schedule import Cursor, EpochPlan, Schedule


class Plans:
    """What a sampler deals in each epoch, from where a loaded state begins in it.

    Attributes:
        schedule: The trace, cut into epochs.
        rank, num_replicas: Of this replica, and of all; members come and go.
        epoch: The epoch that a new loop over the sampler deals.
        start: Where a loaded state begins, until training has ended that epoch.
        accounts: Each optimizer's `Account`, while it is alive, by what it updates.
        padded: Whether every replica has as many minibatches in a step as replica 0.
        is_placed: Whether an update or a loaded state says where the run is.
        has_moved: Whether members come and go: epochs that others have trained
            meanwhile are then passed over.
    """

    def __init__(self, schedule: Schedule, rank: int, num_replicas: int) -> None:
        self.schedule, self.rank, self.num_replicas = schedule, rank, num_replicas
        self.padded = self.is_placed = self.has_moved = False
        self.accounts = weakref.WeakValueDictionary[int, Any]()
        self.epoch = 0
        self.start: Cursor | None = None
        self._plans: dict[int, EpochPlan] = {}

    def plan(self, epoch: int) -> EpochPlan:
        """Returns an epoch's plan, from where a loaded state begins in it."""
        if epoch not in self._plans:
            start, plan = self.start, self.schedule.plan(epoch, self.num_replicas)
            first = start.step if start and epoch == start.epoch else 0
            if self.is_passed(epoch):
                first = plan.num_steps
            plan = dataclasses.replace(plan, start_step=first, padded=self.padded)
            self._plans = {epoch: plan, **dict([*self._plans.items()][:1])}
        return self._plans[epoch]

    def is_passed(self, epoch: int) -> bool:
        """Returns whether the other members have trained an epoch without this one."""
        epochs = [account.epoch for account in self.accounts.values()]
        return self.has_moved and epoch < min(epochs, default=0)

    def begin_epoch(self, epoch: int) -> EpochPlan:
        """Returns a plan as `plan` does; of another pass over an epoch, the whole one.

        Raises ValueError if a restored run is in a later epoch.
        """
        if self.start and epoch < self.start.epoch and not self.is_passed(epoch):
            raise ValueError(
                f"set_epoch({epoch}): the restored run is in epoch "
                f"{self.start.epoch}; begin with range(sampler.epoch, num_epochs)"
            )
        if self.start is None and self.plan(epoch).start_step:
            del self._plans[epoch]
        return self.plan(epoch)

    @property
    def cursor(self) -> Cursor:
        """The first step that not every optimizer has done."""
        start = Cursor(self.epoch, self.plan(self.epoch).start_step)
        return min((a.cursor for a in self.accounts.values()), default=start)

    @property
    def global_step(self) -> int:
        """How many steps are done since training began: those before `cursor`."""
        epoch, step = self.cursor
        return self.schedule.steps(epoch).start + step

    def replan(self, schedule: Schedule) -> None:
        """Takes a schedule that is equal in all steps that were dealt from."""
        self.schedule, self._plans = schedule, {}
        for account in self.accounts.values():
            account.replan()

    def pad(self) -> None:
        """Deals every replica as many minibatches in a step as replica 0."""
        self.padded, self._plans = True, {}
