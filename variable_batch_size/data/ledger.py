"""What a sampler has dealt of a run's minibatches, and where its loops go on.

A minibatch of a replica is dealt by a loop over the sampler, perhaps read ahead by a
loader, handed to the training loop, and trained by `ElasticOptimizer.step`; an update
commits its step. The `Ledger` of a sampler knows what was dealt, and the `Account` of
every optimizer what was handed to it, trained and committed. Both hold no tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Iterator

from variable_batch_size.data.plans import Plans
from variable_batch_size.data.schedule import Cursor, Place, Schedule


@dataclasses.dataclass(eq=False)
class Loop:
    """A loop over a sampler: its epoch, and the place of its next minibatch there."""

    epoch: int
    step: int
    substep: int
    is_followed: bool = False  # what it deals is handed out by `Ledger.receive`


class Ledger(Plans):
    """What the sampler of one replica has dealt, and who trains it.

    Attributes:
        deal: Counts how often dealt minibatches have become stale.
    """

    def __init__(self, schedule: Schedule, rank: int, num_replicas: int) -> None:
        super().__init__(schedule, rank, num_replicas)
        self.deal = 0
        self._lock = threading.RLock()  # loaders ask in threads of their own
        self._loop: Loop | None = None  # the newest
        self._will_be_followed = False
        self._fetched: deque[tuple[int, Place]] = deque()

    # --- dealing --------------------------------------------------------------------

    def new_loop(self) -> Loop:
        """Returns a loop over `epoch` that begins where training has got to.

        So breaking a loop off loses nothing. Of an epoch that has ended, the loop deals
        all minibatches; or none, where other members may have trained them.
        """
        there = [a for a in self.accounts.values() if a.epoch == self.epoch]
        there = [a for a in there if self.has_moved or not a.ended]
        first = self.plan(self.epoch).start_step, 0
        place = min(((a.number, a.substep) for a in there), default=first)
        return Loop(self.epoch, *place)

    def begin(self) -> Loop:
        """Returns a new loop, the one that deals from now on."""
        with self._lock:
            self._loop = loop = self.new_loop()
            loop.is_followed, self._will_be_followed = self._will_be_followed, False
            self._fetched.clear()
            for account in self.accounts.values():
                account.begin_loop(loop.is_followed)
            return loop

    def next_of(self, loop: Loop) -> slice | None:
        """Deals a loop's next minibatch; returns its part of the order.

        Returns None at the end of the epoch. Raises ValueError there if training has
        left out a minibatch, and RuntimeError if a newer loop has taken over.
        """
        with self._lock:
            if self._loop is not loop:
                raise RuntimeError(
                    f"a newer loop over the sampler has taken over from this one of "
                    f"epoch {loop.epoch}; to look at a batch, take another sampler"
                )
            plan = self.plan(loop.epoch)
            while (step := plan.step(loop.step, self.rank)) and (
                loop.substep >= step.num_substeps
            ):
                loop.step, loop.substep = loop.step + 1, 0
            if step is None:
                if not loop.is_followed:
                    self.end(is_sure=False)
                return None
            dealt = self.deal, Place(loop.epoch, loop.step, loop.substep)
            if loop.is_followed:
                self._fetched.append(dealt)
            for account in self.accounts.values():
                account.take(*dealt, is_run=not loop.is_followed)
            number = loop.substep * self.num_replicas + self.rank
            loop.substep += 1
            return plan.samples_of(loop.step, min(number, step.num_minibatches - 1))

    def end(self, is_sure: bool = True) -> None:
        """Raises ValueError if training has left out minibatches of the newest loop.

        ``is_sure``: Training was handed all of them; else some may be on the way.
        """
        for account in self.accounts.values():
            account.refuse_left_out(is_sure)

    @contextlib.contextmanager
    def paused(self) -> Iterator[int]:
        """Deals nothing in the block; gives the last step that was dealt from, or -1.

        Steps are numbered since training began. A loader that reads ahead waits.
        """
        with self._lock:
            loop, latest = self._loop, -1
            if loop is not None and loop.epoch <= self.epoch:
                latest = self.plan(loop.epoch).first_step + loop.step
            yield latest

    # --- for a loader that reads ahead ----------------------------------------------

    @contextlib.contextmanager
    def followed(self) -> Iterator[int]:
        """Has `receive` hand out for a loop that begins in a block; gives the deal."""
        self._will_be_followed = True
        try:
            yield self.deal
        finally:
            self._will_be_followed = False

    def receive(self) -> bool:
        """Hands out what a loader returns next; returns False if that is stale."""
        deal, place = self._fetched.popleft()
        if deal == self.deal:
            for account in self.accounts.values():
                account.take(deal, place, is_run=True)
        return deal == self.deal

    def goes_on(self, deal: int, epoch: int) -> bool:
        """Returns whether a loop that began in this deal and epoch has ended early."""
        there = [a for a in self.accounts.values() if a.epoch == epoch]
        return deal != self.deal and not all(a.ended for a in there)

    # --- training somewhere else ----------------------------------------------------

    def redeal(self, cursor: Cursor | None = None) -> None:
        """Deals the steps under way anew, or those after a cursor.

        All that was dealt is stale. The newest loop goes there, or ends with its epoch.
        """
        with self._lock:
            self.deal += 1
            if cursor is not None:
                self.start, self._plans = cursor, {}
            for account in self.accounts.values():
                account.go_to(*(cursor or account.cursor))
            (epoch, step), loop = self.cursor, self._loop
            if loop is not None and epoch >= loop.epoch:
                is_over = epoch > loop.epoch
                loop.step = self.plan(loop.epoch).num_steps if is_over else step
                loop.substep = 0

    def move(self, rank: int, num_replicas: int, cursor: Cursor) -> None:
        """Goes on as another replica, after another step, where members change."""
        with self._lock:
            self.rank, self.num_replicas, self.has_moved = rank, num_replicas, True
            self.redeal(cursor)

    def load(self, schedule: Schedule, cursor: Cursor) -> None:
        """Goes on after the step of a saved state, with that state's batch sizes."""
        with self._lock:
            self.schedule, self.epoch, self.is_placed = schedule, cursor.epoch, True
            self.redeal(cursor)
            for account in self.accounts.values():
                account.announced = account.has_run = False
