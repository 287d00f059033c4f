"""A device loader that runs ahead of the training loop and raises its exceptions."""

from __future__ import annotations

import dataclasses
import functools
import logging
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from xla_replica.common.trees import map_tensors

if TYPE_CHECKING:
    from xla_replica.backends.replica import Replica

logger = logging.getLogger(__name__)

_warn_once = functools.cache(logger.warning)
_END = object()


def _warn_of_slow_workers(loader: Any) -> None:
    """Warns, once, where every epoch's workers import torch and the script again."""
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    if (
        getattr(loader, "num_workers", 0)
        and not getattr(loader, "persistent_workers", True)
        and context.get_start_method(allow_none=True) in ("spawn", "forkserver")
    ):
        _warn_once(
            "this DataLoader's workers are not forked, so each imports torch and the "
            "script, which takes seconds, at every epoch: pass persistent_workers=True"
        )


def load_ahead(
    replica: Replica, batches: Iterable[Any], prefetch: int
) -> Iterable[Any]:
    """Returns batches as they are on the device, loaded as their sampler needs it.

    Args:
        replica: Whose device it is.
        batches: Any iterable. A sampler of ours, in a ``DataLoader`` or bare, has a
            ``ledger`` of what it deals, or may say ``ends_graphs``.
        prefetch: How many batches may wait on the device; for a GPU they wait in pinned
            memory, and are copied when their turn has come.
    """
    if replica.is_primary:
        _warn_of_slow_workers(batches)

    def ahead(batches: Iterable[Any]) -> Iterable[Any]:
        if replica.is_host:  # they are there already
            return batches
        if replica.has_streams:
            return DeviceLoader(batches, pinned, prefetch, replica.send)
        return DeviceLoader(batches, replica.send, prefetch)

    sampler = getattr(batches, "batch_sampler", None)
    if sampler is None:
        sampler = getattr(batches, "sampler", batches)
    ledger = getattr(sampler, "ledger", None)
    if ledger is not None:
        return FreshBatches(batches, ledger, ahead)
    cuts = replica.is_lazy and getattr(sampler, "ends_graphs", False)
    return CutBatches(ahead(batches), replica.sync) if cuts else ahead(batches)


@dataclasses.dataclass(eq=False)
class _Loader:
    """Is as long as the batches that it iterates over."""

    batches: Iterable[Any]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


@dataclasses.dataclass(eq=False)
class DeviceLoader(_Loader):
    """Iterates over ``batches`` as ``send`` moves them, ahead of the training loop.

    A background thread keeps up to ``prefetch`` batches ready on the device. The first
    batch is loaded in the caller's thread, which owns the device, so that a sampler may
    begin its epoch with work on the device. An exception is raised where the batch
    would have been returned.

    Args:
        batches: Any iterable, usually a ``torch.utils.data.DataLoader``.
        send: Moves one batch to the device; called in the background thread, except
            for the first batch.
        prefetch: How many batches may wait on the device, at least 1.
        receive: From what ``send`` has returned to the batch; called in the caller's
            thread when the batch's turn has come.
    """

    send: Callable[[Any], Any]
    prefetch: int = 2
    receive: Callable[[Any], Any] = lambda sent: sent

    def __iter__(self) -> Iterator[Any]:
        # A generator: what is dealt after the end of an iterator, as a step that is run
        # again then is, belongs to the next one.
        batches = (batch for batch in self.batches)
        if (first := next(batches, _END)) is _END:
            return

        def load() -> Any:
            batch = next(batches, _END)
            return batch if batch is _END else self.send(batch)

        thread = ThreadPoolExecutor(1, "device-loader")
        try:
            waiting = deque(thread.submit(load) for _ in range(self.prefetch))
            yield self.receive(self.send(first))
            while (batch := waiting.popleft().result()) is not _END:
                waiting.append(thread.submit(load))
                yield self.receive(batch)
        finally:  # also when the training loop breaks out early
            # What has begun to load ends: a sampler that counts what it has dealt
            # finds the same number in every run.
            thread.shutdown()


@dataclasses.dataclass(eq=False)
class FreshBatches(_Loader):
    """Drops batches that were fetched ahead of a step that is run again, as they come.

    Args:
        batches: A loader, iterated again if it has read to its end too early.
        ledger: The ``ledger`` of what deals its minibatches. It has an ``epoch``, and
            four methods: ``followed()``, a context in which what is dealt is handed out
            by ``receive()``, which returns False of a minibatch that is to be dropped;
            ``goes_on(deal, epoch)``, whether training lacks some after the loader's
            end, where ``deal`` is what the context gave; and ``end()``, called after
            the last one.
        ahead: Returns an iterable over what it is given, as `DeviceLoader`.
    """

    ledger: Any
    ahead: Callable[[Iterable[Any]], Iterable[Any]]

    def __iter__(self) -> Iterator[Any]:
        epoch, is_behind = self.ledger.epoch, True
        while is_behind:
            with self.ledger.followed() as deal:
                for batch in self.ahead(self.batches):
                    if self.ledger.receive():
                        yield batch
            is_behind = self.ledger.goes_on(deal, epoch)
        self.ledger.end()


@dataclasses.dataclass(eq=False)
class CutBatches(_Loader):
    """Ends the lazy graph after every batch, and where there was none.

    So replicas with other numbers of batches, and batches of other sizes, are alike
    after the loop: what they sum there is the same program on all.
    """

    sync: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield batch
            self.sync()
        self.sync()


def pinned(batch: Any) -> Any:
    """Returns a batch in memory from which a copy to a GPU does not make the host wait.

    Sparse tensors, which cannot all be pinned, stay as they are, and so do those that
    are on the GPU.
    """

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        is_dense = tensor.layout == torch.strided
        return tensor.pin_memory() if is_dense and tensor.is_cpu else tensor

    return map_tensors(batch, pin)
