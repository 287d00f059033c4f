"""`MemberReplica`: a replica whose peers come and go, and its collectives."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import io
import logging
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._utils import _take_tensors

from xla_replica.backends.distributed import BUCKET_BYTES
from xla_replica.backends.replica import Replica, listed
from xla_replica.common.trees import map_tensors, tensors_in
from xla_replica.errors import MemberLost, ReplicaError
from xla_replica.members.generation import Generation
from xla_replica.members.membership import Membership

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05  # how often a sum that has not arrived looks who is lost
_CONNECT_SECONDS = 5.0
_MOST_ATTEMPTS = 20  # to connect, where members meet


class MemberReplica(Replica):
    """This process, one of the members of a run.

    It is alone until it first meets the others, see `change`. Then a collective raises
    `MemberLost` if a member dies, hangs or leaves, and no verb works until `change`.
    Tensors of an accelerator are summed on the host, one transfer in each direction.

    Args:
        membership: Finds the other members.
        alone: This process as the only replica of its job, which computes.
        timeout: Seconds that a living member may be late at a collective.
    """

    is_live = True

    def __init__(
        self,
        membership: Membership,
        alone: Replica,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(0, 1, alone.device, "a member of a live run")
        self.membership, self._alone = membership, alone
        # What concerns the device alone is as the backend has it.
        for verb in ("sync", "wait", "fetch", "send", "rng_state", "set_rng_state"):
            setattr(self, verb, getattr(alone, verb))
        self._timeout = timeout
        self._group: Any = None  # gloo's; None while it is alone
        # A worker of a loader that freed a group would take its sockets away from here.
        os.register_at_fork(after_in_child=gc.freeze)
        atexit.register(self._drop_group)
        self._is_broken = False

    @property
    def wants_change(self) -> bool:
        return self.membership.someone_waits

    @property
    def generation(self) -> int:
        met = self.membership.generation
        return met.number if met else 0

    def seed(self, seed: int) -> None:
        self._alone.seed(seed + self.rank)  # to which it adds its own, 0

    # --- generations ----------------------------------------------------------------

    def change(self, mark: tuple[int, ...], is_between: bool = False) -> Generation:
        """Meets the other members; returns the generation that sums from now on.

        Args: See `Offer`.
        """
        self._drop_group()
        for _ in range(_MOST_ATTEMPTS):
            generation = self.membership.agree(mark, is_between)
            self.rank = generation.members.index(self.membership.id)
            self.num_replicas = len(generation.members)
            try:
                self._join(generation)
                return generation
            except MemberLost as error:
                logger.warning(f"members meet again: {error}")
                problem = str(error)
                self._drop_group()
        raise ReplicaError(
            f"members have met {_MOST_ATTEMPTS} times, and have not been able to "
            "connect: they reach the lighthouse, but perhaps not each other's ports. "
            f"The last problem: {problem}",
            self.rank,
        )

    def leave(self, mark: tuple[int, ...]) -> None:
        """Tells the others, who meet now, that this member goes."""
        self._drop_group()
        self.membership.agree(mark, leaves=True)
        self.membership.leave()

    def _join(self, generation: Generation) -> None:
        self._is_broken = False
        if self.num_replicas == 1:
            return
        self._group = self._connect(range(self.num_replicas))
        self.barrier()

    def _connect(self, ranks: Sequence[int]) -> Any:
        """Returns a group of some members of this generation, once for each choice."""
        gloo = torch.distributed.ProcessGroupGloo
        generation = self.membership.generation
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.membership.host)]
        options._timeout = timedelta(seconds=self._timeout)
        host, port = generation.offers[0].store.rsplit(":", 1)
        try:
            # Its owner may have died since; who lives answers at once.
            patience = timedelta(seconds=min(self._timeout, _CONNECT_SECONDS))
            store = torch.distributed.TCPStore(host, int(port), timeout=patience)
            keys = f"{generation.number}-{generation.lineage}-{list(ranks)}"
            store = torch.distributed.PrefixStore(keys, store)
            return gloo(store, ranks.index(self.rank), len(ranks), options)
        except RuntimeError as error:
            raise self._loss("joining a group", error) from error

    def _drop_group(self) -> None:
        """Ends the group, so that what the others wait for fails at once."""
        self._group, self._is_broken = None, True

    def _loss(self, verb: str, error: Any) -> MemberLost:
        return MemberLost(
            f"member {self.rank} of {self.num_replicas} has lost another one in {verb} "
            f"({error})",
            self.rank,
        )

    @property
    def _is_alone(self) -> bool:
        """Whether there is nobody to sum with, which is not so after a loss."""
        return self._group is None and not self._is_broken

    # --- collectives ----------------------------------------------------------------

    def _wait(self, verb: str, begin: Any, group: Any = None) -> None:
        """Waits for a collective, of all members or a group, as long as all live."""
        if self._is_alone:
            return
        if self._is_broken:
            raise self._loss(verb, "and has not met the others since")
        done = threading.Event()
        try:
            work = begin(group or self._group)
            work.get_future().add_done_callback(lambda _: done.set())
            while not done.wait(_LOOK_SECONDS):
                is_cut_off = self.membership.has_lost or self.membership.was_silent
                if is_cut_off and not done.is_set():
                    # What hangs cannot be ended, and to free its group would wait for
                    # it, or abort where Python exits.
                    hanging = ctypes.py_object(group or self._group)
                    ctypes.pythonapi.Py_IncRef(hanging)
                    raise self._loss(verb, "it is not heard of any more")
            work.wait()
            self.membership.note_together()
        except RuntimeError as error:
            self._drop_group()
            if isinstance(error, MemberLost):
                raise
            raise self._loss(verb, error) from error

    def all_reduce_(self, tensors: Sequence[torch.Tensor]) -> None:
        tensors = listed("all_reduce_", tensors)
        if self._is_alone and self.is_host:
            return
        with torch.no_grad():
            # Of one member, too: on a lazy device what follows is another program then.
            on_host = tensors if self.is_host else self.fetch(tensors)
            for own, sent in zip(_buckets(tensors), _buckets(on_host)):
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in sent])
                self._wait(
                    "all_reduce_", lambda group, flat=flat: group.allreduce([flat])
                )
                if not self.is_host:
                    flat = self.send(flat)
                parts = flat.split([tensor.numel() for tensor in own])
                for tensor, part in zip(own, parts):
                    tensor.copy_(part.view_as(tensor))

    def all_max(self, tensor: torch.Tensor) -> torch.Tensor:
        [value] = self.fetch([tensor])
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MAX
        self._wait("all_max", lambda group: group.allreduce([value], options))
        return self.send(value)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach().contiguous()
        if self._is_alone:
            return value.clone().unsqueeze(0)
        [value] = self.fetch([value])
        gathered = [torch.empty_like(value) for _ in range(self.num_replicas)]
        self._wait("all_gather", lambda group: group.allgather([gathered], [value]))
        return self.send(torch.stack(gathered))

    def broadcast_(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        self._check_source(source)
        tensors = listed("broadcast_", tensors)
        if self._is_alone:
            return
        for tensor, value in zip(tensors, self.fetch(tensors)):
            send = functools.partial(_broadcast, value, source)
            self._wait("broadcast_", send)
            with torch.no_grad():
                tensor.copy_(value)

    def share(
        self, state: Any, source: int, receivers: Sequence[int] | None = None
    ) -> Any:
        """Returns member ``source``'s ``state`` on every member, its own unchanged.

        It is loaded as a checkpoint is, without code. Other members' is not read. With
        ``receivers``, once in a generation, it goes to these alone.
        """
        is_source, group = self.rank == source, None
        if receivers is not None and len(receivers) + 1 < self.num_replicas:
            if self.rank not in (source, *receivers):
                return state
            ranks = sorted((source, *receivers))
            group, source = self._connect(ranks), ranks.index(source)

        def broadcast(tensor: torch.Tensor) -> None:
            flat = tensor.reshape(-1)  # of one number, its stride may be 0
            content = flat.as_strided(flat.shape, (1,)).view(torch.uint8)
            pieces = content.split(BUCKET_BYTES)  # each has its own timeout
            for piece in pieces if len(content) else ():
                send = functools.partial(_broadcast, piece, source)
                self._wait("share", send, group)

        buffer = io.BytesIO()
        if is_source:  # all but the numbers
            torch.save(map_tensors(state, lambda tensor: tensor.to("meta")), buffer)
        size = torch.tensor([buffer.tell()])
        broadcast(size)
        outline = torch.empty(int(size), dtype=torch.uint8)
        if is_source:
            outline = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        broadcast(outline)
        if not is_source:
            received = io.BytesIO(memoryview(outline.numpy()))
            state = torch.load(received, weights_only=True)
            state = map_tensors(state, lambda t: torch.empty(t.shape, dtype=t.dtype))
        for tensor in tensors_in(state):
            broadcast(tensor.contiguous())
        return state


def _broadcast(tensor: torch.Tensor, source: int, group: Any) -> Any:
    return group.broadcast(tensor, source)


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return list(_take_tensors(tensors, BUCKET_BYTES))
