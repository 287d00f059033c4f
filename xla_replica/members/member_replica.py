"""`MemberReplica`: a replica whose peers come and go, and its collectives."""

from __future__ import annotations

import atexit
import bisect
import contextlib
import ctypes
import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch._utils import _take_tensors

from xla_replica.backends.distributed import BUCKET_BYTES
from xla_replica.backends.gradient_sum import Begin
from xla_replica.backends.replica import Replica, listed
from xla_replica.common.trees import NamedTensors, Tensors, copy_parts_, map_tensors
from xla_replica.device.sharded import joined_parts, parts_of
from xla_replica.errors import MemberLost, ReplicaError, Stopped
from xla_replica.loader_workers import watch_parents
from xla_replica.members.generation import Generation
from xla_replica.members.host_group import Slice, connect, send_state, store_at
from xla_replica.members.membership import LiveOptions, Membership, in_thread
from xla_replica.members.state_pieces import Pieces, as_bytes, deliver, deliveries

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05  # how often a sum that has not arrived looks who is lost
_CONNECT_SECONDS = 12.0  # torch asks for hosts' names: a name server has 5 s, twice
_NOT_HEARD = "it is not heard of any more"
_OF_DEVICES = (
    "sync", "wait", "fetch", "send", "rng_state", "set_rng_state", "check_parameters",
    "is_sharded", "local", "sum_over_shards", "on_gradient", "read_shards", "shards",
)  # fmt: skip
_MOST_ATTEMPTS = 20  # of the same members, to connect where they meet


class MemberReplica(Replica):
    """A replica of a member of a run, where members come and go.

    A member is one replica, or a slice of several, which sum on their devices. Then its
    first replica sums with those of the other members on the host, and tells the others
    of its slice: one transfer of each in either direction. Of parameters that FSDP2
    shards in the member, each replica sums its parts with those of the same rank.

    The member is alone until it first meets the others, see `change`. Then a collective
    raises `MemberLost` if a member dies, hangs or leaves, and no verb works until
    `change`. All replicas of a member call every verb, and raise together.

    Args:
        inner: The replica among those of its member alone.
        membership: Finds the other members; None but on the member's first replica.
        options: What the environment says of members.

    Attributes:
        member: The number of its member.
        met: The generation; None before the first.
        leads: Whether this is the first replica of its member.
    """

    is_live = True

    def __init__(
        self, inner: Replica, membership: Membership | None, options: LiveOptions
    ) -> None:
        reason = f"of a member of a live run; {inner.reason}"
        super().__init__(inner.rank, inner.num_replicas, inner.device, reason)
        self._membership, self._inner, self.overlaps = membership, inner, self.is_host
        # What concerns the device alone is as the backend has it.
        for name in _OF_DEVICES:
            setattr(self, name, getattr(inner, name))
        self._patience = options.patience_seconds
        self._timeout = options.timeout_seconds
        address = membership.store_address if membership else ""
        self._slice = Slice(inner, address, 2 * self._timeout + 4 * self._patience)
        self.leads = self._slice.leads
        self._update_file = os.environ.get("LIVE_UPDATE_FILE")
        self.met: Generation | None = None
        self.member, self._firsts = 0, [0]  # the lowest rank of each member
        self._group: Any = None  # gloo's; None while it is alone, or does not lead
        self._is_broken, self._problem = False, ""
        self._has_shards = False
        self._begun: list[Any] = []  # what may not have ended when the group is dropped
        self._pieces: Pieces | None = None  # of a state that is not whole yet
        self._hanging: list[tuple[Any, Any]] = []  # groups, each with what hangs in it
        # A worker of a loader that freed a group would take its sockets away from here.
        os.register_at_fork(after_in_child=gc.freeze)
        watch_parents()
        atexit.register(self._drop_group)

    @property
    def brings(self) -> bool:
        """Whether it brings its member's state to `share`, or its part of that."""
        return self.leads or self._has_shards

    @property
    def wants_change(self) -> bool:
        return self._membership is not None and self._membership.someone_waits

    def seed(self, seed: int) -> None:
        self._inner.seed(seed + self.rank - self._inner.rank)  # which it adds

    def gather_at_rest(self, value: Any) -> list[Any]:
        return [value]

    def choose(self, find: Callable[[], Any]) -> Any:
        return self._inner.choose(find) if self._has_shards else find()

    # --- generations ----------------------------------------------------------------

    def describe(self, settings: dict[str, Any], is_behind: Callable[[], bool]) -> None:
        """Notes what `Membership` is told of the run; see there."""
        if self._membership:
            self._membership.settings = settings
            self._membership.is_behind = is_behind

    def change(self, mark: tuple[int, ...], is_between: bool = False) -> Generation:
        """Meets the other members; returns the generation that sums from now on.

        Args: See `Offer`.
        """
        self._drop_group()
        num_same, last = 0, tuple[str, ...]()  # attempts of the same members
        while num_same < _MOST_ATTEMPTS:
            found: Any = None
            if self._membership:
                try:
                    generation = self._membership.agree(mark, is_between)
                    found = {"met": generation, "me": self._membership.id}
                except Stopped as error:
                    found = {"stopped": [error.reason, error.exit_status]}
            found = self._slice.share(found)
            if "stopped" in found:
                raise Stopped(*found["stopped"])
            self._take(found["met"], found["me"])
            try:
                self.together([self._join] if self.brings else [])
                return self.met
            except MemberLost:
                self._drop_group()
            num_same = num_same + 1 if self.met.members == last else 1
            last = self.met.members
        raise ReplicaError(
            f"the same members have met {_MOST_ATTEMPTS} times, and have not been able "
            "to connect: they reach the lighthouse, but perhaps not each other's "
            f"ports. The last problem: {self._problem}",
            self.rank,
        )

    def _take(self, generation: Generation, me: str) -> None:
        """Takes its place in a generation."""
        self.met, self._is_broken = generation, False
        self.generation = generation.number
        self.member = generation.members.index(me)
        sizes = [offer.num_replicas for offer in generation.offers]
        *self._firsts, self.num_replicas = itertools.accumulate(sizes, initial=0)
        self.rank = self._firsts[self.member] + self._inner.rank

    def leave(self, mark: tuple[int, ...], why: str) -> None:
        """Tells the others, who meet now, that this member goes."""
        self._drop_group()
        if self._membership:
            self._membership.agree(mark, leaves=why)

    def note_update(self) -> None:
        """Tells who has started this member that it has made an update."""
        if self._update_file and self.leads:  # once
            Path(self._update_file).touch(0o600)
            self._update_file = None

    def in_member(self, value: bool) -> bool:
        """Returns whether any replica of this member brings True."""
        return bool(self._slice.gather(torch.tensor([int(value)])).any())

    def member_of(self, rank: int) -> int:
        """Returns the number of a replica's member; older ones have lower numbers."""
        return bisect.bisect_right(self._firsts, rank) - 1

    # --- with other members ---------------------------------------------------------

    def together(self, waits: Iterable[Callable[[], None]]) -> None:
        lost: MemberLost | None = None
        try:
            super().together(waits)
        except MemberLost as error:
            lost = error
            if self._has_shards:  # others of this member wait for those of that one
                self._slice.note_loss(self._keys)
        if self.in_member(lost is not None):
            self._is_broken = True
            raise lost or self._loss("a collective", "which another replica knows")

    def _lead(self, verb: str, begin: Callable[[Any], Any]) -> None:
        """Waits for a collective in which the first replica stands for its member.

        Raises MemberLost on all replicas of the member if it does there.
        """
        wait = partial(self._wait, verb, begin)
        self.together([wait] if self.leads else [])

    def _join(self) -> None:
        """Joins the group of the members of this generation; waits until all have."""
        if self._is_alone:
            return
        keys = f"{self._keys}-{self._inner.rank}"

        def make() -> Any:
            # Its owner may have died since; who lives answers at once.
            patience = min(self._timeout, _CONNECT_SECONDS)
            store = store_at(self.met.offers[0].store, patience)
            store = torch.distributed.PrefixStore(keys, store)
            place = self.member, len(self.met.members)
            return connect(store, *place, self._slice.host, self._timeout)

        with self._noticing("joining a group"):
            self._group = self._made(make, 2 * self._timeout)
        self._wait("joining", methodcaller("allreduce", [torch.zeros(1)]))

    def _made(self, make: Callable[[], Any], seconds: float = float("inf")) -> Any:
        """Returns what a function makes, in a thread that is left alone after a loss.

        gloo can wait for ever, whatever its timeout, for one that dies meanwhile.
        """
        give_up = time.monotonic() + seconds

        def look() -> None:
            if self._is_cut_off or time.monotonic() > give_up:
                raise self._loss("meeting", _NOT_HEARD)

        return in_thread(make, look)

    def _drop_group(self) -> None:
        """Ends the group, so that what the others wait for fails at once.

        What hangs cannot be ended, and to free its group would wait for it, as long as
        a healthy member keeps its own group, or abort where Python exits.
        """
        if not all(work.is_completed() for work in self._begun):
            hanging = ctypes.py_object(self._group)
            ctypes.pythonapi.Py_IncRef(hanging)
            self._hanging.append((hanging, self._begun))
        self._group, self._begun, self._is_broken = None, [], True
        for hanging in [*self._hanging]:
            if all(work.is_completed() for work in hanging[1]):  # who was silent ended
                ctypes.pythonapi.Py_DecRef(hanging[0])
                self._hanging.remove(hanging)

    @contextlib.contextmanager
    def _noticing(self, verb: str) -> Iterator[None]:
        """Raises MemberLost in place of gloo's errors, whose text is for the log."""
        try:
            yield
        except RuntimeError as error:
            self._drop_group()
            if isinstance(error, MemberLost):
                raise
            self._problem = str(error)
            logger.debug(f"{verb}: {error}")
            raise self._loss(verb, "a connection has ended") from None

    def _loss(self, verb: str, why: str) -> MemberLost:
        num_members = len(self.met.members) if self.met else 1
        return MemberLost(
            f"member {self.member} of {num_members} has lost another one in {verb} "
            f"({why}). A script's own collectives belong in functions that it "
            "attaches: docs/live.md#what-a-script-needs",
            self.rank,
        )

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other member to sum with. It is not after a loss."""
        return not self._is_broken and (self.met is None or len(self.met.members) == 1)

    @property
    def _is_cut_off(self) -> bool:
        """Whether another member is not heard of, or this one was not."""
        if self._has_shards and self._slice.has_loss(self._keys):
            return True
        return self._was_silent or bool(self._membership and self._membership.has_lost)

    @property
    def _was_silent(self) -> bool:
        return bool(self._membership and self._membership.was_silent)

    @property
    def _keys(self) -> str:
        """What the keys of this generation begin with."""
        return f"{self.met.number}-{self.met.lineage}"

    def _check_met(self, verb: str = "all_reduce_") -> None:
        """Raises MemberLost if this member must meet the others first."""
        if self._is_broken or self._was_silent:
            raise self._loss(verb, "or was silent, and has not met the others since")

    def _wait(self, verb: str, begin: Callable[[Any], Any]) -> None:
        """Waits for a collective of the members' group, as long as all live."""
        if self._is_alone:
            return
        self._check_met(verb)
        with self._noticing(verb):
            work = begin(self._group)
            # Not by a callback, which would abort where Python exits before it is run.
            while not _ends_soon(work):
                if self._is_cut_off:
                    self._begun.append(work)
                    raise self._loss(verb, _NOT_HEARD)
            if self._membership:
                self._membership.note_together()

    def _sum_over_members(self, verb: str, tensor: torch.Tensor, *of: Any) -> None:
        """Replaces a tensor on the first replica's host by its sum over members.

        Or by what another ``ReduceOp`` makes of it.
        """
        if tensor.numel():
            self._lead(verb, methodcaller("allreduce", [tensor], *of))
            self._slice.tell(tensor)

    def _rows(self, verb: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``(num_replicas, *tensor.shape)`` on the host: every replica's.

        A program that made it would depend on the number of replicas.
        """
        [value] = self.fetch([tensor.detach().contiguous()])
        own = self._slice.gather(as_bytes(value))
        rows = torch.zeros(self.num_replicas, own.shape[1], dtype=torch.uint8)
        first = self._firsts[self.member]
        rows[first : first + len(own)] = own  # members' rows are apart
        self._sum_over_members(verb, rows)
        return rows.view(-1).view(value.dtype).reshape(self.num_replicas, *value.shape)

    # --- collectives ----------------------------------------------------------------

    def all_reduce_(self, tensors: Tensors) -> None:
        tensors = listed("all_reduce_", tensors)
        # The results of a program are in the order in which tensors were written, and a
        # replica without a minibatch has written to them in another one.
        sums = [each.detach().clone() for each in tensors] if self.is_lazy else tensors
        self._inner.all_reduce_(sums)
        if self._is_alone and self.is_host:
            return
        with torch.no_grad():
            # Of one member, too: on a lazy device what follows is another program then.
            on_host = sums
            if not self.is_host and self.leads:
                on_host = self.fetch(sums)
            elif not self.is_host:  # told below
                self.sync()  # as `fetch` begins: the same program
                on_host = [torch.empty(each.shape, dtype=each.dtype) for each in sums]
            buckets = (_take_tensors(each, BUCKET_BYTES) for each in (tensors, on_host))
            for own, sent in zip(*buckets):
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in sent])
                self._sum_over_members("all_reduce_", flat)
                copy_parts_(own, self.send(flat))

    def sums_parts(self) -> Begin | None:
        if not self.is_host:
            raise TypeError(
                "live members whose model FSDP2 shards compute on CPUs so far: "
                "train it without LIVE_LIGHTHOUSE, or keep it whole"
            )
        self._has_shards = True
        return None if self._is_alone else self._begin_over_members

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begins a sum over members, in the order of all others.

        A loss is raised by the function that waits for it, not out of backward(). A
        slice, whose replicas sum first, does so there.
        """
        if self.is_host and self._inner.num_replicas == 1:
            return self._begin_over_members(tensor)
        return super().begin_sum(tensor)

    def _begin_over_members(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begins the sum of a tensor with those of the same rank, see `begin_sum`."""
        begun: Any = None
        if self._group is not None and not self._is_broken:
            with contextlib.suppress(MemberLost), self._noticing("all_reduce_"):
                begun = self._group.allreduce([tensor])
                running = [each for each in self._begun if not each.is_completed()]
                self._begun = [*running, begun]
        return lambda: self._wait("all_reduce_", lambda group: begun)

    def barrier(self) -> None:
        """As long as members may take to meet, since one may write a file meanwhile."""
        self.wait()
        options = torch.distributed.AllreduceOptions()
        options.timeout = timedelta(seconds=self._patience)
        self._lead("barrier", methodcaller("allreduce", [torch.zeros(1)], options))

    @contextlib.contextmanager
    def writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # another one writes, or all have moved on
            if not isinstance(error, MemberLost):
                self.leave((), f"has not saved {what}: {error}")
            raise
        self.barrier()

    def all_max(self, tensor: torch.Tensor) -> torch.Tensor:
        [largest] = self.fetch([self._inner.all_max(tensor)])
        self._sum_over_members("all_max", largest, torch.distributed.ReduceOp.MAX)
        return self.send(largest)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.num_replicas == 1:
            return tensor.detach().clone().unsqueeze(0)
        return self.send(self._rows("all_gather", tensor))

    def write_shards(self, folder: Path, tensors: NamedTensors) -> dict[str, str]:
        return self._inner.write_shards(folder, tensors) if self.member == 0 else {}

    def _broadcast_(self, tensors: list[torch.Tensor], source: int) -> None:
        if self._is_alone:  # as where a script builds its model
            self._inner.broadcast_(tensors, source)
            return
        for tensor in tensors:
            if self.is_sharded([tensor]):  # all members have one state
                self._inner.broadcast_([tensor])
                continue
            tensor.copy_(self._rows("broadcast_", tensor)[source])

    def share(
        self, common: Any, state: Any, source: int, receivers: Sequence[int]
    ) -> tuple[Any, Any]:
        """Returns what is common to all, and a state, as member ``source`` has them.

        The state on the replicas of the receivers alone. It comes in pieces: others
        bring their own, and send what is as the source has it, about as much each, and
        wait for nothing else. A receiver that loses a sender keeps what has come until
        it calls this again.
        """

        receives = self.member in receivers and self.member != source
        own, (state, shapes) = state, parts_of(state)
        common = common, shapes

        def broadcast(tensor: torch.Tensor) -> None:
            self._wait("share", methodcaller("broadcast", tensor, source))

        def exchange() -> None:
            nonlocal common, state
            sent = common, map_tensors(state, lambda tensor: tensor.to("meta"))
            common, form = send_state(sent, self.member == source, broadcast)
            if receives:
                state = map_tensors(form, lambda t: torch.empty(t.shape, dtype=t.dtype))
            if receivers:
                kept, self._pieces = self._pieces, Pieces(state, form, not receives)
                if receives and kept:
                    self._pieces.keep(kept)
                self._bring(self._pieces, source, receivers)
                self._pieces = None

        self.together([exchange] if self.brings and not self._is_alone else [])
        common, shapes = common
        if receives and self.brings:
            like = self.shards.places if self._has_shards else []
            own = joined_parts(state, shapes, like)
        if self._has_shards:
            return common, own
        if self.member in receivers:
            own = self._slice.share(own)
        return self._slice.share(common), own

    def _bring(self, pieces: Pieces, source: int, receivers: Sequence[int]) -> None:
        """Sends and receives pieces; raises MemberLost if some have not come."""
        sums = torch.zeros(len(self.met.members), len(pieces.sizes)).long()
        sums[self.member] = pieces.sums
        self._wait("share", methodcaller("allreduce", [sums]))
        found = deliveries(sums, source, receivers, pieces.sizes)
        self._made(partial(deliver, self._group, self.member, pieces, found))
        if self.member in receivers and not pieces.sums.equal(sums[source]):
            raise self._loss("share", "a part of a state has not come")


def _ends_soon(work: Any) -> bool:
    """Waits a moment for a collective; raises RuntimeError if it has failed."""
    try:
        return work.wait(timedelta(seconds=_LOOK_SECONDS))
    except RuntimeError:  # or it has only not ended yet
        return work.is_completed() and work.wait()


def as_member(replica: Replica) -> Replica:
    """Returns a replica as one of a member, if this process belongs to one.

    Collective over the replicas that sum without other members.
    """
    address = os.environ.get("LIVE_LIGHTHOUSE")
    if address is None or replica.is_live:
        return replica
    joined = sorted(name for name in os.environ if name.startswith("MEGASCALE_"))
    if joined:
        raise ReplicaError(
            f"{', '.join(joined)} join this slice with others in one runtime, and "
            "LIVE_LIGHTHOUSE makes it a member of a live run: unset one or the other",
            replica.rank,
        )
    options, membership = LiveOptions.of_environment(), None
    if replica.rank == 0:
        membership = Membership(address, options, replica.num_replicas)
    return MemberReplica(replica, membership, options)
