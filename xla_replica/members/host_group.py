"""Groups of processes, or of threads, that exchange what is on their hosts by gloo."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from xla_replica.backends.distributed import BUCKET_BYTES
from xla_replica.backends.replica import Replica
from xla_replica.members.generation import Generation, Offer

# For good, since the replicas of a slice may be threads, and load at one time.
torch.serialization.add_safe_globals([Generation, Offer])


def store_at(address: str, seconds: float) -> Any:
    """Returns a client of the key-value store at an address, which may take so long."""
    host, port = address.rsplit(":", 1)
    patience = timedelta(seconds=seconds)
    return torch.distributed.TCPStore(host, int(port), timeout=patience)


def connect(store: Any, rank: int, size: int, host: str, timeout: float) -> Any:
    """Returns a process group of those that bring the same keys of a store."""
    gloo = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return gloo(store, rank, size, options)


def send_state(
    state: Any, is_source: bool, broadcast: Callable[[torch.Tensor], None]
) -> Any:
    """Returns the source's state, plain values with tensors, on all that call it.

    It is loaded as a checkpoint is, without code, and may have offers and generations.
    The others' is not read.

    Args:
        state: The source's.
        is_source: Whether it is this one's.
        broadcast: Replaces a tensor's content by the source's.
    """
    buffer = io.BytesIO()
    if is_source:
        torch.save(state, buffer)
    size = torch.tensor([buffer.tell()])
    broadcast(size)
    content = torch.empty(int(size), dtype=torch.uint8)
    if is_source:
        content = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    for piece in content.split(BUCKET_BYTES):  # each with its own timeout
        broadcast(piece)
    received = io.BytesIO(memoryview(content.numpy()))
    return state if is_source else torch.load(received, weights_only=True)


class Slice:
    """The replicas of one member; what the first one finds out, it tells the others.

    They may be threads, processes or hosts.

    Args:
        inner: This one among them.
        address: That of the first one's key-value store; others' is not read.
        timeout: Seconds that they wait for the first.

    Attributes:
        leads: Whether this is the first.
    """

    def __init__(self, inner: Replica, address: str, timeout: float) -> None:
        self._inner, self.leads = inner, inner.rank == 0
        self._group = self._store = None
        self.host = address.rsplit(":", 1)[0]
        if inner.num_replicas > 1:
            address = inner.all_gather_object(address)[0]
            self._store = store_at(address, timeout)
            store = torch.distributed.PrefixStore("slice", self._store)
            host, port = address.rsplit(":", 1)
            with socket.create_connection((host, int(port)), timeout) as connection:
                self.host = connection.getsockname()[0]
            place = inner.rank, inner.num_replicas, self.host
            self._group = connect(store, *place, timeout)

    def note_loss(self, generation: str) -> None:
        """Tells the others of the slice that a member is lost, whatever they wait for.

        A collective among them cannot: one may wait for a process of another member.
        """
        if self._store is not None:
            self._store.set(f"lost {generation}", "1")

    def has_loss(self, generation: str) -> bool:
        """Returns whether one of them has told so."""
        return self._store is not None and self._store.check([f"lost {generation}"])

    def tell(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor on the host by that of the first replica."""
        if self._group is not None and tensor.numel():
            self._group.broadcast(tensor, 0).wait()

    def share(self, state: Any) -> Any:
        """Returns the first replica's state; see `send_state`."""
        return send_state(state, self.leads, self.tell) if self._group else state

    def gather(self, content: torch.Tensor) -> torch.Tensor:
        """Returns ``(replicas, n)``: the ``(n,)`` numbers of each."""
        rows = [torch.empty_like(content) for _ in range(self._inner.num_replicas)]
        if self._group is None or not len(content):
            return content.unsqueeze(0).expand(len(rows), -1)
        self._group.allgather([rows], [content]).wait()
        return torch.stack(rows)
