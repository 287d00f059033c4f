"""A member's part in finding out who lives, who waits to join, and who trains next.

Liveness and quorum are those of torchft's lighthouse: a server that hears heartbeats,
and answers a request for a quorum when all that live have made one.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import socket
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

from xla_replica.errors import ReplicaError, Stopped, Superseded
from xla_replica.members.generation import Generation, Offer, next_generation, prove
from xla_replica.stopping import stop_requested

logger = logging.getLogger(__name__)

_BEATS_PER_TIMEOUT = 8
_LOOK_SECONDS = 0.05
_END_SECONDS = 5.0  # more than a heartbeat and a look at the page may take
_LOOKS_ALONE = 5 * _BEATS_PER_TIMEOUT  # since others' heartbeats may be late
# What members tell those of their generation by a heartbeat of such a name, which all
# read on the lighthouse's page: who does not come sends no heartbeat; all are to meet.
_HANGS, _MEETS = "hangs", "meets"
_SEEN = re.compile(r"(member-[0-9a-f]{32}): seen ([0-9.e+-]+)s ago")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


class LiveOptions(NamedTuple):
    """Each of these is the variable ``LIVE_`` and its name, where that is set.

    Attributes:
        token: A text that all members of the run know.
        min_members: How many must be there for training to go on.
        heartbeat_seconds: After how long a member that is not heard of counts as dead:
            the lighthouse's own option, which must be the same.
        patience_seconds: For the others, where members meet.
        timeout_seconds: How late a living member may be at a collective.
        interface: The network interface by which others reach this member, such as
            ``eth1``; by default the one that leads to the lighthouse.
    """

    token: str = ""
    min_members: int = 1
    heartbeat_seconds: float = 1.0
    patience_seconds: float = 300.0
    timeout_seconds: float = 60.0
    interface: str = ""

    @classmethod
    def of_environment(cls) -> LiveOptions:
        """Returns what the environment says; raises ReplicaError if it errs."""
        told: dict[str, Any] = {}
        for option, default in cls._field_defaults.items():
            text = os.environ.get(name := f"LIVE_{option.upper()}")
            try:
                told[option] = default if text is None else type(default)(text)
            except ValueError as error:
                raise ReplicaError(f"{name}={text!r}: {error}") from error
        return cls(**told)


DEFAULTS = LiveOptions()


class Membership:
    """Talks to the lighthouse, in a thread of its own and when members meet.

    Args:
        lighthouse: Its address, such as ``http://127.0.0.1:29510``.
        options: What the environment says of members.
        num_replicas: How many this member has.

    Attributes:
        id: This process's name among the members.
        host: The address by which other members reach this one.
        store_address: That of this member's key-value store.
        was_silent: Whether the others had reason to take it for dead since it last met
            them. Then it must meet them again: what they had begun to sum before they
            went on without it may still end.
        generation: The last one that it was in; None before the first.
        settings: What members must have in common, as plain values by name.
        is_behind: Whether a checkpoint is newer than this member's state.
    """

    def __init__(
        self, lighthouse: str, options: LiveOptions = DEFAULTS, num_replicas: int = 1
    ) -> None:
        self._address = lighthouse.rstrip("/")
        self._token, self._min_members = options.token, options.min_members
        self._heartbeat_seconds = options.heartbeat_seconds
        self._patience, self._num_replicas = options.patience_seconds, num_replicas
        self.id = _new_id()
        self.generation: Generation | None = None
        self._quorum = self._last_quorum = 0  # numbers of the last two
        self._lost: Generation | None = None  # in which one was lost
        self.was_silent = self._is_asking = False  # for a generation
        self._has_joined = True  # the others of the generation, in a collective
        self.settings: Mapping[str, Any] = {}
        self.is_behind: Callable[[], bool] = bool
        # Ids of who has left or was refused, and what the watch has seen last.
        self._ignored: set[str] = {self.id}
        self._page, self._seen = "", dict[str, float]()
        # Members that have hung, perhaps: to be told only if they were silent, too.
        self._left_out: set[str] = set()
        # After members that have joined and gone nobody joins for a while.
        self._pause, self._admits_at = 0.0, 0.0
        self._heard_at = time.monotonic()  # when the lighthouse last heard of this one
        host, self._client = self._connect()
        self.host = _address_of(options.interface) if options.interface else host
        self._store = torch.distributed.TCPStore(
            self.host, 0, is_master=True, wait_for_workers=False
        )
        self.store_address = f"{self.host}:{self._store.port}"
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="members", daemon=True)
        atexit.register(self._end)

    def _connect(self) -> tuple[str, Any]:
        """Returns this host's address, as the lighthouse sees it, and a client of that.

        Raises ReplicaError if there is none.
        """
        os.environ.setdefault("RUST_LOG", "warn")  # every request would be a line
        from torchft.coordination import LighthouseClient

        try:
            place = urlsplit(self._address)
            with socket.create_connection((place.hostname, place.port), 10) as reached:
                host = reached.getsockname()[0]
            patience = timedelta(seconds=min(self._patience, 10))
            return host, LighthouseClient(self._address, patience)
        except (RuntimeError, ValueError, OSError) as error:
            raise ReplicaError(
                f"there is no lighthouse at {self._address}: start one with `python -m "
                "xla_replica.members lighthouse`, or correct LIVE_LIGHTHOUSE, an "
                f"address such as http://127.0.0.1:29510 ({error})"
            ) from error

    # --- where members meet ---------------------------------------------------------

    def agree(
        self, mark: tuple[int, ...], is_between: bool = False, leaves: str = ""
    ) -> Generation:
        """Returns the next generation, when all that live have asked for it. Blocks.

        Args: See `Offer`.

        Raises:
            Superseded: The others have trained on without this member and have ended.
            Stopped: It waits for others, and was asked to stop.
            ReplicaError: It is not of this run, or no lighthouse has answered for long.
        """
        if self._thread.ident is None:  # the lighthouse waits for whom it hears
            self._thread.start()
        self._note_silence(self._heard_at)
        self._is_asking = True
        if self.was_silent or self.has_lost or not self._has_joined:
            self._tell(_MEETS)  # the others may wait for this one in a collective
        # The lighthouse answers without one that hangs after this patience, no sooner.
        tells_at, num_alone = time.monotonic() + self._patience, 0
        superseded: Superseded | None = None
        offer = self._offer()._replace(mark=mark, is_between=is_between, leaves=leaves)
        while True:
            offers = self._ask(offer)
            try:
                self._check_is_not_left(offers)
                found = next_generation(offers, self.id, self._token, self._min_members)
            except Superseded as error:
                if leaves:
                    raise
                # At once: those whose heartbeats are late see only new members wait.
                logger.warning(f"this member joins anew with their state: {error}")
                self.id, self.generation, self.was_silent = _new_id(), None, False
                self._ignored.add(self.id)
                superseded, offer = error, self._offer()
                continue
            if superseded is not None and len(offers) == 1:  # there is nobody to join
                found, num_alone = None, num_alone + 1
                if num_alone > _LOOKS_ALONE:
                    raise superseded
            if found is not None:
                break
            self._check_stop(is_waiting=True)
            if time.monotonic() > tells_at:
                tells_at += self._patience
                logger.warning(
                    f"waits for members: there are {len(offers)}, and training needs "
                    f"{self._min_members} (LIVE_MIN_MEMBERS)"
                )
            time.sleep(self._heartbeat_seconds / _BEATS_PER_TIMEOUT)
        going = {m: f"is refused: {why}" for m, why in found.refused.items()}
        going |= {m: each.leaves for m, each in offers.items() if each.leaves}
        for member in going.keys() - self._ignored:
            logger.warning(f"{offers[member].name} {going[member]}")
        self._ignored |= {*going}
        self.was_silent = self._is_asking = self._has_joined = False
        if last := self.generation:
            self._note_joiners(last, found, mark)
            if tells_at - time.monotonic() < self._patience / 2:  # else silent ones
                self._left_out |= {*last.members} - {*found.members}
        if leaves:
            self.leave()
        else:
            self.generation = found
        return found

    def _offer(self) -> Offer:
        """Returns what this member brings beside what `agree` is given; see `Offer`."""
        last = self.generation
        return Offer(
            prove(self._token, self.id),
            self.store_address,
            self.settings,
            (last.number, last.lineage) if last else (0, ""),
            last.members.index(self.id) if last else 0,
            was_silent=self.was_silent,
            num_replicas=self._num_replicas,
            name=f"process {os.getpid()} on {socket.gethostname()}",
            keeps_out=time.monotonic() < self._admits_at,
        )

    def _note_joiners(self, last: Generation, now: Generation, mark: Any) -> None:
        """Doubles the pause if some have joined and gone without an update."""
        joined = {m for m, each in zip(last.members, last.offers) if each.is_new}
        has_updated = mark[:1] > max(each.mark[:1] for each in last.offers)
        if joined and has_updated:
            self._pause = 0.0
        elif joined - {*now.members}:
            self._pause = min(max(2 * self._pause, self._heartbeat_seconds), 60.0)
            self._admits_at = time.monotonic() + self._pause

    def note_together(self) -> None:
        """Notes that a collective has ended, as it may without a lighthouse."""
        self._heard_at, self._has_joined = time.monotonic(), True

    def _note_silence(self, since: float) -> None:
        """Notes it if the others had reason to take this member for dead."""
        now = time.monotonic()
        self.was_silent |= now - since > self._heartbeat_seconds
        self._heard_at = now

    def _check_is_not_left(self, offers: Mapping[str, Offer]) -> None:
        """Raises Superseded if others have trained on and ended meanwhile.

        They have left a newer checkpoint then, and nobody who is here has a state.
        """
        last, missed = self.generation, self._quorum - self._last_quorum
        is_apart = last is not None and self.was_silent and len(last.members) > 1
        has_peers = any(m != self.id and not offers[m].is_new for m in offers)
        if is_apart and not has_peers and missed not in (0, 1) and self.is_behind():
            raise Superseded(
                f"this member was not heard of for {self._heartbeat_seconds:g} s, and "
                f"generation {last.number} is gone: start it again"
            )
        self._last_quorum = self._quorum

    def _ask(self, offer: Offer) -> dict[str, Offer]:
        """Returns what the members of a quorum offer, by id."""
        # Longer than the lighthouse waits for one that hangs, so that it answers all.
        place = self.id, timedelta(seconds=self._patience + self._heartbeat_seconds)
        shown = {"store_address": offer.store, "world_size": 1}  # on its page
        ask = partial(self._client.quorum, *place, data=offer._asdict(), **shown)
        seconds = 0.0
        while True:
            began = time.monotonic()
            try:
                quorum = in_thread(ask, self._check_stop)
            except (RuntimeError, TimeoutError) as error:
                # At most what it was to take: this member may have been paused.
                seconds += min(time.monotonic() - began, self._patience)
                seconds += self._heartbeat_seconds
                if seconds > 2 * self._patience and not self._seen:  # else it is there
                    raise ReplicaError(
                        f"the lighthouse at {self._address} has made no quorum for "
                        f"{2 * self._patience:g} s: {error}"
                    ) from error
                logger.warning(f"waits for all that the lighthouse hears of: {error}")
                self._tell(_HANGS)  # else half of those that it hears of are too few
                time.sleep(self._heartbeat_seconds)
                continue
            self._quorum = quorum.quorum_id
            return {m.replica_id: _read(m.data) for m in quorum.participants}

    def _check_stop(self, is_waiting: bool = False) -> None:
        """Raises Stopped if this member was asked to stop, and nobody needs it now.

        That is while it waits to join, or for as many members as training needs.
        """
        request = stop_requested()
        if request is not None and (is_waiting or self.generation is None):
            self.leave()
            raise Stopped(*request)

    def _tell(self, what: str) -> None:
        """Tells the others of the generation, once."""
        last = self.generation
        if last and len(last.members) > 1 and not self._is_told(what):
            with contextlib.suppress(RuntimeError):  # the lighthouse does not answer
                name = f"{what}-{last.lineage}"
                self._client.heartbeat(name, timedelta(seconds=1))

    def _is_told(self, what: str) -> bool:
        last = self.generation
        return last is not None and f"{what}-{last.lineage}" in self._page

    def leave(self) -> None:
        """Stops heartbeats: the others need not wait for this member any more."""
        self._leaving.set()

    def _end(self) -> None:
        """Leaves, and waits for the watch: Python's end aborts amid its heartbeat."""
        self.leave()
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)

    # --- what the watch knows -------------------------------------------------------

    @property
    def has_lost(self) -> bool:
        """Whether a member of the generation is not heard of, or another one meets."""
        return self._lost is not None and self._lost is self.generation

    @property
    def someone_waits(self) -> bool:
        """Whether a living process wants to join the generation, or has to."""
        # Fewer than have passed since a death when the others meet.
        limit = 3 * self._heartbeat_seconds / _BEATS_PER_TIMEOUT
        members = self.generation.members if self.generation else ()
        known = {*self._ignored, *self._left_out, *members}
        is_new = any(age < limit and m not in known for m, age in self._seen.items())
        may_join = time.monotonic() >= self._admits_at
        return (is_new and may_join) or 0 < len(members) < self._min_members

    def _watch(self) -> None:
        """Sends heartbeats and looks who else does, until this member leaves."""
        pause = self._heartbeat_seconds / _BEATS_PER_TIMEOUT
        told_at = float("inf")  # by the last heartbeat, unless one failed since
        while not self._leaving.wait(pause):
            began = time.monotonic()
            if not self._is_asking and self._is_told(_HANGS):
                self.was_silent = True  # and it stays so until it asks, too
                continue
            try:
                self._client.heartbeat(self.id, timedelta(seconds=1))
                # Sums may have ended since, also those of who was stopped meanwhile.
                self._note_silence(min(told_at, self._heard_at))
                told_at = began
                with urllib.request.urlopen(f"{self._address}/status", timeout=1) as it:
                    self._page = re.sub(r"<[^>]*>", "", it.read().decode())
            except (RuntimeError, OSError):
                # Training goes on until somebody dies.
                self._seen, told_at = {}, float("inf")
                continue
            self._seen = {m: float(age) for m, age in _SEEN.findall(self._page)}
            limit = self._heartbeat_seconds
            self._left_out -= {m for m, age in self._seen.items() if age >= limit}
            # A lighthouse that has just started does not know who it will hear of.
            last = self.generation
            members = last.members if last else ()
            is_lost = any(self._seen.get(m, 0) >= limit for m in members)
            self._lost = last if is_lost or self._is_told(_MEETS) else None


def in_thread(make: Callable[[], Any], look: Callable[[], Any]) -> Any:
    """Returns what a function makes in a thread, or raises what it raises.

    Native code may wait there for ever: the thread is left alone once ``look``, which
    is called meanwhile, raises.
    """
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(make())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="waits", daemon=True).start()
    look()
    while not wait([found], _LOOK_SECONDS).done:
        look()
    return found.result()


def _new_id() -> str:
    return f"member-{uuid.uuid4().hex}"


def _read(data: Mapping[str, Any] | None) -> Offer:
    """Returns an offer as it came through JSON."""
    values = {name: v for name, v in (data or {}).items() if name in Offer._fields}
    for name in {"generation", "mark"} & {*values}:
        values[name] = tuple(values[name])
    return Offer(**{"proof": "", "store": "", "settings": {}, **values})


def _address_of(interface: str) -> str:
    """Returns this host's address on a network interface."""
    try:
        import fcntl  # not on Windows

        request = interface.encode().ljust(256, b"\0")  # struct ifreq
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            return socket.inet_ntoa(fcntl.ioctl(asked, _GET_ADDRESS, request)[20:24])
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ReplicaError(
            f"LIVE_INTERFACE={interface!r} has no IPv4 address, of {names}: {error}"
        ) from error
