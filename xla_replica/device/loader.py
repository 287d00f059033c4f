"""A device loader that runs ahead of the training loop and raises its exceptions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from xla_replica.common.arguments import check_integer

_END = object()


class DeviceLoader:
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
        if (first := next(batches, _END)) is _END:
            return

        def load() -> Any:
            batch = next(batches, _END)
            return batch if batch is _END else self.send(batch)

        thread = ThreadPoolExecutor(1, "device-loader")
        try:
            waiting = deque(thread.submit(load) for _ in range(self.prefetch))
            yield self.send(first)
            while (batch := waiting.popleft().result()) is not _END:
                waiting.append(thread.submit(load))
                yield batch
        finally:  # also when the training loop breaks out early
            thread.shutdown(cancel_futures=True)
