"""How the members of a run stay together, and how one that is behind catches up.

A member that joins, or has missed an update in which another one died, receives what a
checkpoint has from one that is furthest, from memory.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import xla_replica
from variable_batch_size.step.attached import Update
from variable_batch_size.step.settings import StepContext
from variable_batch_size.step.update_loop import UpdateLoop
from xla_replica import MemberLost, ReplicaError, Stopped

logger = logging.getLogger(__name__)

State = dict[str, Any]
_MOST_MEETINGS = 5


class LiveRun:
    """Takes a run from one generation of members to the next, on one of them.

    Args:
        context, loop: Those of the optimizer.
        snapshot: Returns what a checkpoint has, without a collective.
        load: Takes what that has returned.
        begin: Loads the newest checkpoint, if there is one, on this member alone.
        changed: Called when other members train than before.
        is_saved: Whether an object's state is a part of a snapshot.
    """

    def __init__(
        self,
        context: StepContext,
        loop: UpdateLoop,
        snapshot: Callable[[], State],
        load: Callable[[State], Any],
        begin: Callable[[], Any],
        changed: Callable[[int], Any],
        is_saved: Callable[[Any], bool],
    ) -> None:
        self._context, self._loop = context, loop
        self._snapshot, self._load, self._begin = snapshot, load, begin
        self._changed, self.is_saved = changed, is_saved
        self._has_state = False
        self._update: Update | None = None  # whose functions run
        self._names: list[str] = []  # what members that train have attached
        self._last_met: tuple[Any, ...] = ()  # at which mark, and with whom
        self._num_same = 0  # meetings of that kind, one after another

    def enter(self, settings: State) -> None:
        """Joins the run, or begins it with others that are new. Blocks until then.

        Args:
            settings: What members must have in common, plain values by name.
        """
        self._context.replica.describe(settings)
        self._meet()

    def resume(self, update: Update | None = None) -> Update | None:
        """Meets the others after a loss, or where that was agreed on.

        Args:
            update: The one whose attached functions are running, if some are.

        Returns:
            That of another member that was further, whose functions are still to run.
        """
        self._update = update
        self._meet()
        update, self._update = self._update, None
        return update

    def check_attached(self) -> None:
        """Raises ValueError unless what is attached can go on in other members.

        Or ReplicaError where others have attached something else.
        """
        attached = self._loop.attached
        attached.check_states(self.is_saved)
        if self._names and self._names != attached.names():
            raise ReplicaError(
                f"this member has attached {attached.names()}, and the run "
                f"{self._names}: attach the same on every member, in the same order"
            )
        self._names = []

    def leave(self) -> None:
        """Leaves the run between two updates; raises `Stopped`."""
        request = xla_replica.stop_requested()
        self._context.replica.leave(self._mark())
        logger.warning(f"left the run after {self._mark()[0]} updates: {request}")
        raise Stopped(request.reason, request.exit_status)

    def _mark(self) -> tuple[int, ...]:
        """Returns how far this member has come; nothing without a state."""
        if not self._has_state:
            return ()
        account = self._loop.account
        return account.global_step, self._loop.attached.num_done, account.epoch

    def _meet(self) -> None:
        replica, loop = self._context.replica, self._loop
        while True:
            is_between = self._update is not None
            generation = replica.change(self._mark(), is_between)
            marks = [tuple(offer.mark) for offer in generation.offers]
            self._check_progress(generation.members)
            try:
                self._equalise(marks)
            except MemberLost as error:
                logger.warning(f"members meet again: {error}")
                continue
            break
        if replica.is_primary:
            logger.info(
                f"generation {generation.number}: {replica.num_replicas} members train "
                f"from step {loop.account.global_step} on"
            )
        self._changed(generation.number)

    def _check_progress(self, members: tuple[str, ...]) -> None:
        """Raises ReplicaError if the same members meet at one place again and again."""
        met = self._mark(), members
        self._num_same = self._num_same + 1 if met == self._last_met else 0
        self._last_met = met
        if self._num_same == _MOST_MEETINGS:
            raise ReplicaError(
                f"{len(members)} members met {_MOST_MEETINGS + 1} times at one place: "
                "a collective fails every time; see the warnings before"
            )

    def _equalise(self, marks: list[tuple[int, ...]]) -> None:
        """Gives every member the state of one that is furthest; deals anew."""
        context, loop = self._context, self._loop
        replica, exact = context.replica, context.exact
        furthest = max(marks)
        source = marks.index(furthest)  # nobody has a state if its mark is empty
        is_source = replica.member == source and replica.leads
        # The place before anything is loaded, which this member had dealt to another.
        ledger = context.sampler.ledger
        ledger.rank, ledger.num_replicas = replica.rank, replica.num_replicas
        if is_source and not self._has_state:
            self._begin()
            self._has_state = True
        behind = [
            member
            for member, mark in enumerate(marks)
            if mark != furthest or not furthest
        ]
        if behind:
            state = self._packed() if is_source else None
            state = replica.share(state, source, behind)
            if replica.member in behind and not is_source:
                self._unpack(state)
        grid = replica.share(exact.grid.state_dict() if is_source else None, source)
        loop.deal_to(replica.rank, replica.num_replicas)
        replica.sync()  # compiled now, it is what follows a loss, too
        exact.meet(grid)
        replica.sync()

    def _packed(self) -> State:
        """Returns what another member needs to go on from here."""
        run, account = self._snapshot(), self._loop.account
        # In an epoch's first step the last update is one of the epoch before, whose
        # order may be gone.
        place = {"epoch": account.epoch, "step": account.number}
        if account.number == 0:
            place["order"] = None
        run["optimizer"]["elastic"]["sampler"] |= place
        update = self._update and dataclasses.asdict(self._update)
        if update:
            numbers = [float(lr) for lr in update["lr"]]
            update |= {
                "lr": numbers,
                "weight": update["weight"] and float(update["weight"]),
            }
        state = {
            "run": run,
            "update": update,
            "num_done": self._loop.attached.num_done,
            # Who has not begun its first epoch may not have attached all.
            "attached": self._loop.attached.names() if account.announced else [],
        }
        replica = self._context.replica
        # Nothing changes while it is sent, so that what is there needs no copy.
        return state if replica.is_host else replica.to_host(state)

    def _unpack(self, state: State) -> None:
        had_state, self._has_state = self._has_state, True
        self._names = [] if had_state else state["attached"]
        self._load(state["run"])
        loop, update = self._loop, state["update"]
        loop.attached.num_done = state["num_done"]
        loop.account.announced = had_state  # a new one calls set_epoch
        self._update = None
        if update is not None:
            update["lr"] = tuple(update["lr"])
            self._update = Update(**update)
