"""What a sampler has dealt of a run's minibatches, and where its loops go on.

A minibatch of a replica is dealt by a loop over the sampler, perhaps read ahead by a
loader, handed to the training loop, and trained by `ElasticOptimizer.step`; an update
commits its step. The `Ledger` of a sampler knows what was dealt, and the `Account` of
every optimizer what was handed to it, trained and committed. Everything else follows
from their counts: where a run resumes, what is dealt once more, which minibatch a loop
has left out. Both are integers alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from variable_batch_size.data.schedule import Cursor, EpochPlan, Place, Schedule


@dataclasses.dataclass(eq=False)
class Loop:
    """A loop over a sampler: the epoch that it deals, and its next minibatch."""

    epoch: int
    deal: int = -1  # the one that it has followed; none before its first minibatch
    step: int = 0
    substep: int = 0


class Ledger:
    """What the sampler of one replica has dealt, and who trains it.

    Args:
        schedule: The trace, cut into epochs.
        rank, num_replicas: Of this replica, and of all; members come and go.

    Attributes:
        deal: Raised where minibatches that were dealt are not to be trained any more.
        epoch: The epoch that a new loop over the sampler deals.
        accounts: Each optimizer's `Account`, while it is alive, by what it updates.
        is_placed: Whether an update or a loaded state says where the run is.
        is_resumed: Whether a loaded state says where an epoch begins.
    """

    def __init__(self, schedule: Schedule, rank: int, num_replicas: int) -> None:
        self.schedule, self.rank, self.num_replicas = schedule, rank, num_replicas
        self.padded = self.is_placed = self.is_resumed = False
        self.deal = self.epoch = 0
        self._start = Cursor(0, 0)  # of a state that was loaded
        self._plans: dict[int, EpochPlan] = {}
        self.__setstate__({})

    def plan(self, epoch: int) -> EpochPlan:
        """Returns an epoch's plan, from where a loaded state resumes it.

        Raises TraceExhausted if the trace has ended and ``on_end='error'``.
        """
        plan = self._plans.get(epoch)
        if plan is None:
            plan = dataclasses.replace(
                self.schedule.plan(epoch, self.num_replicas),
                start_step=self._first_step(epoch),
                padded=self.padded,
            )
            self._plans = {epoch: plan, **dict([*self._plans.items()][:1])}
        return plan

    def begin_epoch(self, epoch: int) -> EpochPlan:
        """Returns a plan as `plan` does: that of a whole epoch, where one has ended.

        Raises ValueError if a run that was restored is in a later epoch.
        """
        if epoch < self._start.epoch:
            raise ValueError(
                f"set_epoch({epoch}): the restored run is in epoch "
                f"{self._start.epoch}; begin with range(sampler.epoch, num_epochs)"
            )
        if self.plan(epoch).start_step != self._first_step(epoch):
            del self._plans[epoch]
        return self.plan(epoch)

    def _first_step(self, epoch: int) -> int:
        return self._start.step if epoch == self._start.epoch else 0

    @property
    def cursor(self) -> Cursor:
        """The steps that all optimizers have done, or after which a state was saved."""
        start = Cursor(self.epoch, self.plan(self.epoch).start_step)
        return min((a.cursor for a in self.accounts.values()), default=start)

    @property
    def global_step(self) -> int:
        """How many steps are done since training began: those before `cursor`."""
        epoch, step = self.cursor
        return self.schedule.steps(epoch).start + step

    # --- dealing --------------------------------------------------------------------

    def begin(self) -> Loop:
        """Returns a loop over the epoch that was chosen; older ones deal no more."""
        with self._lock:
            self._loop = Loop(self.epoch)
            self._is_followed, self._will_be_followed = self._will_be_followed, False
            self._fetched.clear()
            for account in self.accounts.values():
                account.begin_loop(self._is_followed)
            return self._loop

    def next_of(self, loop: Loop) -> slice | None:
        """Deals a loop's next minibatch; returns its part of the order, or None.

        None at the end of the epoch.

        Raises:
            RuntimeError: A newer loop deals the rest.
            ValueError: At the end: training has left out a minibatch.
        """
        with self._lock:
            if self._loop is not loop:
                raise RuntimeError(
                    f"a newer loop over the sampler deals the rest of epoch "
                    f"{loop.epoch}: continue that, or begin another; to look at a "
                    "batch, take another sampler"
                )
            loop.step, loop.substep = self.place_of(loop)
            loop.deal, plan = self.deal, self.plan(loop.epoch)
            while (step := plan.step(loop.step, self.rank)) and (
                loop.substep >= step.num_substeps
            ):
                loop.step, loop.substep = loop.step + 1, 0
            # The step that does not fit is looked at, too.
            self._latest = max(self._latest, plan.first_step + loop.step)
            if step is None:
                if not self._is_followed:
                    self.end(is_sure=False)
                return None
            place = Place(loop.epoch, loop.step, loop.substep)
            loop.substep += 1
            self._thread = threading.get_ident()
            if self._is_followed:
                self._fetched.append((self.deal, place))
            for account in self.accounts.values():
                account.take(self.deal, place, is_run=not self._is_followed)
            number = place.substep * self.num_replicas + self.rank
            return plan.samples_of(place.step, min(number, step.num_minibatches - 1))

    def place_of(self, loop: Loop) -> tuple[int, int]:
        """Returns step and substep of a loop's next minibatch.

        A new loop begins where training stands, so that breaking one off loses nothing;
        it deals all of an epoch that has ended. After a redeal a loop goes there, too.
        """
        if loop.deal == self.deal:
            return loop.step, loop.substep
        is_new, accounts = loop.deal < 0, [*self.accounts.values()]
        if not is_new and any(a.epoch > loop.epoch for a in accounts):
            return self.plan(loop.epoch).num_steps, 0  # in the state of who was ahead
        there = [
            a for a in accounts if a.epoch == loop.epoch and not (is_new and a.ended)
        ]
        first = (
            (self.plan(loop.epoch).start_step, 0)
            if is_new
            else (loop.step, loop.substep)
        )
        return min(((a.number, a.substep) for a in there), default=first)

    @property
    def asked_here(self) -> bool:
        """Whether a loop has last asked in the thread that calls."""
        return self._thread == threading.get_ident()

    def end(self, is_sure: bool = True) -> None:
        """Raises ValueError if training has left out minibatches of the newest loop.

        Args:
            is_sure: Whether training has had all of them; else it may have yet to come.
        """
        for account in self.accounts.values():
            account.refuse_left_out(is_sure)

    # --- for a loader that reads ahead ----------------------------------------------

    @contextlib.contextmanager
    def followed(self) -> Iterator[int]:
        """Lets `receive` hand out what a loop in the block deals; gives the deal."""
        self._will_be_followed = True
        try:
            yield self.deal
        finally:
            self._will_be_followed = False

    def receive(self) -> bool:
        """Hands out what a loader returns next; returns False if that is stale."""
        deal, place = self._fetched.popleft()
        if deal != self.deal:
            return False
        self._thread = threading.get_ident()
        for account in self.accounts.values():
            account.take(deal, place, is_run=True)
        return True

    def goes_on(self, deal: int, epoch: int) -> bool:
        """Returns whether training lacks minibatches of a loop that has ended.

        Args:
            deal, epoch: Those of the loop's beginning.
        """
        there = [a for a in self.accounts.values() if a.epoch == epoch]
        return deal != self.deal and any(account.num_left for account in there)

    # --- training somewhere else ----------------------------------------------------

    def redeal(self) -> None:
        """Deals the steps under way anew: what was dealt of them is stale."""
        with self._lock:
            self.deal += 1
            for account in self.accounts.values():
                account.substep = 0

    def move(self, rank: int, num_replicas: int, cursor: Cursor) -> None:
        """Goes on as any replica after any step, as with other members."""
        with self._lock:
            self.rank, self.num_replicas = rank, num_replicas
            self.epoch = max(self.epoch, cursor.epoch)
            self._go_to(cursor)

    def load(self, schedule: Schedule, cursor: Cursor) -> None:
        """Goes on after a step of a state, with the batch sizes that it tells."""
        with self._lock:
            self.schedule, self.epoch, self._latest = schedule, cursor.epoch, -1
            self._go_to(cursor)
            for account in self.accounts.values():
                account.announced = account.has_run = False

    def _go_to(self, cursor: Cursor) -> None:
        self.deal, self._start, self._plans = self.deal + 1, cursor, {}
        self.is_resumed = cursor != (0, 0)
        for account in self.accounts.values():
            account.go_to(*cursor)

    def commit(self, epoch: int, is_end: bool) -> None:
        """Notes that a step of a resumed epoch is done, and whether that is its last.

        Another pass over an epoch that was resumed is then a whole one.
        """
        if is_end or epoch > self._start.epoch:
            self._start, self.is_resumed = Cursor(0, 0), False

    # --- other plans ----------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[int]:
        """Deals nothing in the block; gives the last step that was looked at so far.

        Steps are numbered since training began. A loader that reads ahead waits.
        """
        with self._lock:
            yield self._latest

    def replan(self, schedule: Schedule) -> None:
        """Takes a schedule that is equal in all steps that were looked at."""
        self.schedule, self._plans = schedule, {}
        for account in self.accounts.values():
            account.replan()

    def pad(self) -> None:
        """Deals every replica as many minibatches in a step as replica 0."""
        self.padded, self._plans = True, {}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to this process: loops, and who trains."""
        of_process = ("_lock", "accounts", "_loop", "_latest", "_thread", "_fetched")
        return {k: v for k, v in vars(self).items() if k not in of_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()  # loaders ask in threads of their own
        self.accounts: weakref.WeakValueDictionary[int, Any]
        self.accounts = weakref.WeakValueDictionary()
        self._loop: Loop | None = None  # the newest
        self._latest = -1  # the last step that a loop has looked at
        self._thread = 0  # in which a loop has asked last
        self._is_followed = self._will_be_followed = False
        self._fetched: deque[tuple[int, Place]] = deque()
