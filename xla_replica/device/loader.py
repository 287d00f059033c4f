"""A device loader that runs ahead of the training loop and raises its exceptions."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from xla_replica.common.arguments import check_integer

_END = object()


class _Failure:
    """An exception on its way from the loading thread to the training loop."""

    def __init__(self, exception: BaseException) -> None:
        self.exception = exception


class DeviceLoader:
    """Iterates over ``batches`` as ``send`` moves them, ahead of the training loop.

    A background thread keeps up to ``prefetch`` batches ready on the device. The first
    batch is loaded in the caller's thread, which owns the device, so that a sampler may
    begin its epoch with work on the device.

    Args:
        batches: Any iterable, usually a ``torch.utils.data.DataLoader``.
        send: Moves one batch to the device; called in the background thread, except
            for the first batch.
        prefetch: How many batches may wait on the device, at least 1.

    Raises:
        TypeError, ValueError: ``prefetch`` is not an integer of at least 1.
    """

    def __init__(
        self, batches: Iterable[Any], send: Callable[[Any], Any], prefetch: int = 2
    ) -> None:
        self.batches = batches
        self.send = send
        self.prefetch = check_integer("prefetch", prefetch, least=1)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batches)
        try:
            first = next(batches)
        except StopIteration:
            return
        waiting: queue.Queue[Any] = queue.Queue(self.prefetch)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._fill,
            args=(batches, waiting, stop),
            name="device-loader",
            daemon=True,
        )
        thread.start()
        try:
            yield self.send(first)
            while (item := waiting.get()) is not _END:
                if isinstance(item, _Failure):
                    raise item.exception
                yield item
        finally:  # also when the training loop breaks out early
            stop.set()
            _drain(waiting)
            thread.join()

    def _fill(
        self,
        batches: Iterator[Any],
        waiting: queue.Queue[Any],
        stop: threading.Event,
    ) -> None:
        last: Any = _END
        try:
            for batch in batches:
                if not _put(waiting, self.send(batch), stop):
                    return
        except BaseException as error:  # the training loop raises it, whatever it is
            last = _Failure(error)
        _put(waiting, last, stop)


def _put(waiting: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    """Puts ``item`` unless the consumer has stopped; returns whether it did."""
    while not stop.is_set():
        try:
            waiting.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def _drain(waiting: queue.Queue[Any]) -> None:
    try:
        while True:
            waiting.get_nowait()
    except queue.Empty:
        return
