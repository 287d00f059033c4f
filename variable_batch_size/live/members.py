"""Keeps the members of a run in step, and brings one that is behind up to date.

A member that joins, or has missed an update in which another one died, receives what a
checkpoint has from one that is furthest, from memory.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import pickle
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import xla_replica
from variable_batch_size.data.seeded_dataset import SeededDataset
from variable_batch_size.live.repeatable import environment
from variable_batch_size.runs.run_file import installed_version
from variable_batch_size.step.attached import Update
from variable_batch_size.step.course import Course, common_settings
from variable_batch_size.step.gradients import Modules
from variable_batch_size.step.parts import Ballots
from variable_batch_size.step.update import RunAgain
from xla_replica import MemberLost, ReplicaError, Stopped
from xla_replica.common.trees import map_tensors, without_numpy
from xla_replica.device.sharded import sharding
from xla_replica.members.generation import Generation, difference
from xla_replica.members.state_pieces import as_bytes

logger = logging.getLogger(__name__)

State = dict[str, Any]
_MOST_MEETINGS = 5
_NUM_SAMPLES = 3  # of a dataset, which are compared


def _not_in(other: Generation, members: Generation) -> str:
    """Returns which of these members another generation lacks, for people."""
    return ", ".join(
        f"member {number} ({offer.name})"
        for number, (member, offer) in enumerate(zip(members.members, members.offers))
        if member not in other.members
    )


class LiveBallots(Ballots):
    """Ballots of members that may leave alone, and of those who wait to join."""

    further: State | None = None  # what is compared beside hyperparameters, by name

    def common(self) -> State:
        return {**super().common(), **(self.further or {})}

    def check(self) -> None:
        """Refuses members that differ from the oldest; raises MemberLost on others."""
        try:
            super().check()
        except ReplicaError:  # on all members
            replica, own = self._replica, self._used
            self._differences.zero_()
            expected = replica.all_gather_object(own)[0]
            # One of them may not know the epoch's order yet.
            problem = difference(own | expected, expected | own)
            if not problem:
                raise MemberLost("another one differs", replica.rank) from None
            replica.leave((), f"is refused: {problem}")
            raise ReplicaError(
                f"this member is not of the run that it has joined: {problem}. Start "
                "it with what the others have",
                replica.rank,
            ) from None

    def stop_agreed(self, look: bool, every_seconds: float) -> bool:
        """Returns whether all members stop after the update that was counted last."""
        if self.votes is None:
            return False
        num_cast, _, votes, _ = self.read_votes()
        return votes == num_cast

    def change_agreed(self) -> tuple[bool, bool]:
        """Returns whether members meet now, and whether this one leaves.

        They do if some, not all, were asked to stop, or somebody waits to join.
        """
        num_cast, _, votes, waiting = self.read_votes()
        leaves = 0 < votes < num_cast
        if leaves:  # a member's replicas leave together, or all with the last member
            self._asked = self._replica.in_member(self._asked)
            if self._asked and xla_replica.stop_requested() is None:
                xla_replica.request_stop("another replica of this member is to stop")
            leaves = len(self._replica.met.members) > 1
        return leaves or waiting > 0, leaves and self._asked


class LiveUpdates(Course):
    """Goes on where members are lost or join: runs the step under way again with them.

    `enter` is called once, before the first epoch.
    """

    ballots: Any
    # Whether weights have differed from those of others, and whether the next update is
    # a generation's first.
    _is_lost = _has_state = _has_differed = _is_first = False
    _saver: Any = None  # once it has entered
    _update: Update | None = None  # whose functions run, while members meet
    # The last meetings, as long as they were at one place, with the same members.
    _same_meetings: tuple[Any, ...] = ()
    _problem = ""  # by which members met

    def enter(
        self, settings: State, modules: Modules, begin: Callable[[], Any], saver: Any
    ) -> None:
        """Joins the run, or begins it with others that are new. Blocks until then.

        Args:
            settings: What members must have in common, by name.
            modules: Those that are trained.
            begin: Loads the newest checkpoint, if there is one, on this member alone.
            saver: The `Checkpointer`, whose snapshots members give to each other.
        """
        replica = self.run.replica
        self.run.sums.watch(modules)
        settings = {
            **common_settings(self.run),
            "version": installed_version(),
            **settings,
            **environment(replica),
            "layers": layers(modules),
            "shards": sharding(self.run.parameters()),
            "first samples": first_samples(self.run.sampler.dataset),
        }
        if self._saver is not None:
            raise ReplicaError(
                "in a live run call Checkpointer.load() once, before set_epoch",
                replica.rank,
            )
        self._begin, self._saver = begin, saver
        texts = {name: repr(value) for name, value in settings.items()}
        replica.describe(texts, lambda: saver.newest() > self.account.global_step)
        super().enter(settings, modules, self._meet, saver)

    # --- verbs of an update ---------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        self._check_entered()
        self.attached.check_states(self._saver.saves)
        super().begin_epoch(epoch)

    def update(self, is_alone: bool = True) -> int:
        self._check_entered()
        rates = self.attached.next_rates() if self._is_first else {}
        self.ballots.further = {"attached": self.attached.names(), **rates}
        return super().update(is_alone)

    def rollback(self, error: Exception) -> None:
        self._is_lost = isinstance(error, MemberLost)
        if self._is_lost:
            self._note(error)
        super().rollback(RunAgain() if self._is_lost else error)

    def begin_again(self) -> int:
        """Meets the others after a loss; returns the updates that it has missed.

        They were made by a member that had its sums, and are received with its state.
        Members meet after the exception was handled: until then its traceback keeps the
        group open, and the others wait for it.
        """
        before = self.account.global_step
        super().begin_again()
        if self._is_lost and (update := self._meet()):
            self.after(update)
        return self.account.global_step - before

    def after(self, update: Update) -> None:
        while True:
            try:
                if self._is_first:  # before what is attached, which may differ, too
                    self._is_first = False
                    self.ballots.check()
                super().after(update)
                is_due = (update.step + 1) % self.run.compare_every == 0
                if is_due and self.attached.num_done == len(self.attached.names()):
                    self._compare(update)
                    self.attached.num_done += 1
                break
            except MemberLost as error:
                self._note(error)
            last = self._meet(update)
            if last is None:  # it was left behind, and has joined between two steps
                return
            update = last
        self.run.replica.note_update()
        meets, leaves = self.ballots.change_agreed()
        if leaves:
            self._leave()
        if meets:
            self._meet()

    def between(self, function: Callable[[], Any]) -> Any:
        mark = self._mark()
        while self._mark() == mark:  # else others have run it
            try:
                found = function()
                self.attached.num_done += 1
                return found
            except MemberLost as error:
                self._note(error)
            self._meet(is_between=True)
        return None

    # --- meetings -------------------------------------------------------------------

    def _check_entered(self) -> None:
        """Raises ReplicaError unless this member has joined the run."""
        if self._saver is None:
            raise ReplicaError(
                "in a live run a member joins in Checkpointer.load(), where it gets "
                "the state of the others: call it before optimizer.set_epoch"
            )

    def _leave(self) -> None:
        """Leaves the run between two updates; raises `Stopped`."""
        request = xla_replica.stop_requested()
        self.run.replica.leave(self._mark(), f"leaves: {request.reason}")
        logger.warning(f"left the run after {self._mark()[0]} updates: {request}")
        raise Stopped(request.reason, request.exit_status)

    def _mark(self) -> tuple[int, ...]:
        """Returns how far this member has come; nothing without a state."""
        mark = self.account.global_step, self.attached.num_done, self.account.epoch
        return mark if self._has_state else ()

    def _meet(
        self, update: Update | None = None, is_between: bool = False
    ) -> Update | None:
        """Meets the other members, who go on from where one that is furthest is.

        Args:
            update: The update whose functions run, if any do.
            is_between: Whether another function runs between two updates.

        Returns:
            The update whose functions are to run on, if any are.
        """
        replica, since, self._update = self.run.replica, time.monotonic(), update
        before = replica.met
        while True:
            is_between |= self._update is not None
            generation = replica.change(self._mark(), is_between)
            marks = [tuple(offer.mark) for offer in generation.offers]
            furthest = max(marks)  # empty if no member has a state
            # Members without a state, or with one of an earlier step.
            behind = [n for n, mark in enumerate(marks) if not mark or mark != furthest]
            self._check_progress(generation)
            try:
                self._synchronise(marks.index(furthest), behind)
                break
            except MemberLost as error:
                self._note(error)
        if replica.is_primary:
            text = (
                f"generation {generation.number}: {replica.num_replicas} members train "
                f"from step {self.account.global_step} on, with "
                f"{'exact sums' if self.run.sums.is_exact else 'sums of floats'}"
            )
            if gone := _not_in(generation, before or generation):
                text += f"; {gone} went {time.monotonic() - since:.2f} s ago"
            if joined := _not_in(before or generation, generation):
                text += f"; {joined} joined"
            logger.log(logging.WARNING if gone or joined else logging.INFO, text)
        self._saver.change_members(generation.number)
        update, self._update = self._update, None
        return update

    def _note(self, error: Exception) -> None:
        """Notes why members meet now."""
        self._problem = str(error)
        logger.debug(f"members meet: {error}")

    def _check_progress(self, generation: Generation) -> None:
        """Raises ReplicaError if the same members meet at one place again and again.

        Meetings after a silence do not count: members were paused, or their machine is
        too busy for their heartbeats.
        """
        if any(offer.was_silent for offer in generation.offers):
            return
        now = self._mark(), generation.members
        self._same_meetings = *(m for m in self._same_meetings if m == now), now
        if (number := len(self._same_meetings)) > _MOST_MEETINGS:
            raise ReplicaError(
                f"{len(generation.members)} members met {number} times at one place: "
                f"a collective fails every time, the last one by: {self._problem}"
            )

    def _synchronise(self, source: int, receivers: list[int]) -> None:
        """Gives receivers the state of one member, and begins the step anew on all."""
        run, replica, account = self.run, self.run.replica, self.account
        is_source = replica.member == source and replica.brings
        # The place before anything is loaded, which this member had dealt to another.
        ledger = account.ledger
        ledger.rank, ledger.num_replicas = replica.rank, replica.num_replicas
        if is_source and not self._has_state:  # all are new, or others ended the run
            self._take(self._begin, {})
        receives = replica.member in receivers and not is_source
        brings = receivers and replica.brings and not receives
        common = run.sums.state_dict(), self.gradients.sums.order()
        brought = self._packed() if brings else None
        (sums, order), state = replica.share(common, brought, source, receivers)
        if receives:
            try:
                self._take(lambda: self._saver.take(state["run"]), state)
            except Exception as error:
                replica.leave((), f"is refused: {error}")
                raise
        # Begins the step under way, as the member that has brought these sums it.
        self.gradients.sums.follow(order)
        ledger.move(replica.rank, replica.num_replicas, account.cursor)
        self.restart()
        replica.sync()  # compiled now, it is what follows a loss, too
        run.sums.meet(sums)
        replica.sync()
        self._is_first = True

    # --- equal weights --------------------------------------------------------------

    def _compare(self, update: Update) -> None:
        """Gives the weights that most members have to those that have others.

        Of two members the older one's hold. Raises ReplicaError the second time.
        """
        run, replica = self.run, self.run.replica
        own = 0
        for weights in replica.fetch([replica.local(p) for p in run.parameters()]):
            own = zlib.crc32(as_bytes(weights.contiguous()).numpy(), own)
        of_replicas: list[list[int]] = [[] for _ in replica.met.members]
        for rank, each in enumerate(replica.all_gather_object(own)):
            of_replicas[replica.member_of(rank)].append(each)
        # One of each member, but of shards.
        hashes = [tuple(dict.fromkeys(each)) for each in of_replicas]
        most = max(hashes, key=hashes.count)  # of two the first, which is older
        others = [member for member, each in enumerate(hashes) if each != most]
        if not others:
            return
        problem = (
            f"after update {update.step} the weights of members {others} of "
            f"{len(replica.met.members)} are not those of the others"
        )
        if self._has_differed:
            raise ReplicaError(
                f"{problem}, and not for the first time: a device computes wrongly, or "
                "what is attached, or the optimizer, is not the same everywhere"
            )
        self._has_differed = True
        logger.error(f"{problem}, which they receive now: look at what differs there")
        self._synchronise(hashes.index(most), others)

    # --- a member's state -----------------------------------------------------------

    def _packed(self) -> State:
        """Returns what another member needs to go on from here."""
        run, account = self._saver.snapshot(), self.account
        # In an epoch's first step the last update is one of the epoch before, whose
        # order may be gone.
        place = {"epoch": account.epoch, "step": account.number}
        if account.number == 0:
            place["order"] = None
        run["optimizer"]["elastic"]["sampler"] |= place
        update = without_numpy(map_tensors(self._update or (), torch.Tensor.item))
        done, votes = self.attached.num_done, self.ballots.votes
        state = {"run": run, "update": (*update,), "num_done": done, "votes": votes}
        replica = self.run.replica
        # Nothing changes while it is sent, so that what is there needs no copy.
        return state if replica.is_host else replica.to_host(state)

    def _take(self, load: Callable[[], Any], brought: State) -> None:
        """Loads a state; the loop of a member that had another one goes on."""
        had_state, self._has_state = self._has_state, True
        ledger = self.run.sampler.ledger
        epoch = ledger.epoch
        load()
        if had_state:
            ledger.epoch = epoch  # its loop's, which may be one that is passed
        self.account.announced = had_state  # a new one calls set_epoch
        # Of the update whose functions run.
        self.attached.num_done = brought.get("num_done", 0)
        self.ballots.votes, update = brought.get("votes"), brought.get("update")
        self._update = Update(*update) if update else None


# --- what members must have in common beside the settings of their optimizer ----------


def layers(modules: Modules) -> str:
    """Returns how many layers without parameters there are of each configuration."""
    found = nn.ModuleList(modules.values()).modules()
    found = [each for each in found if not (each._parameters or [*each.children()])]
    shown = Counter(re.sub(" at 0x[0-9a-f]+", "", repr(each)) for each in found)
    return ", ".join(f"{number} x {text}" for text, number in sorted(shown.items()))


def first_samples(dataset: Any) -> str | None:
    """Returns a digest of a dataset's first samples, as `SeededDataset` gives them.

    None if they cannot be compared, since two reads of them differ or fail.
    """
    is_seeded = isinstance(dataset, SeededDataset)
    inner, seed = (dataset.dataset, dataset.seed) if is_seeded else (dataset, 0)
    with contextlib.suppress(Exception):  # it fails again where samples are needed
        # Of a copy, so that a loader's workers share no file that is opened here.
        seeded = SeededDataset(copy.copy(inner), seed)
        reads = [[seeded[n] for n in range(_NUM_SAMPLES)] for _ in range(2)]
        first, second = (pickle.dumps(map_tensors(read, _content)) for read in reads)
        if first == second:
            return hashlib.sha256(first).hexdigest()[:16]
    return None


def _content(tensor: torch.Tensor) -> Any:
    return as_bytes(tensor.detach().contiguous()).numpy(), tensor.shape
