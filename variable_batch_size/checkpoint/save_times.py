"""When to save: the same updates on every replica, though their clocks differ."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from xla_replica import Replica
from xla_replica.common.arguments import check_number


class SaveTimes:
    """Says after which updates to save.

    Minutes are those of replica 0, which tells its peers at few updates, planned ahead
    from how long updates have taken: between them nothing is sent or read.

    Args:
        replica: The replica that the caller runs in.
        every_updates: Save after every so many.
        every_minutes: Save after so many.
        clock: Seconds.

    Raises:
        ValueError, TypeError: A number is not positive.
    """

    def __init__(
        self,
        replica: Replica,
        every_updates: int | None,
        every_minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_updates is not None and (
            isinstance(every_updates, bool)
            or not isinstance(every_updates, int)
            or every_updates < 1
        ):
            raise ValueError(
                f"every_updates must be an integer >= 1, got {every_updates!r}"
            )
        if every_minutes is not None:
            every_minutes = check_number("every_minutes", every_minutes, above=0)
        self._replica = replica
        self._every_updates = every_updates
        self._seconds = None if every_minutes is None else 60 * every_minutes
        self._clock = clock
        self.saved(0)

    def saved(self, num_updates: int) -> None:
        """A checkpoint has just been made of, or loaded at, so many updates."""
        self._since, self._updates_then = self._clock(), num_updates
        self._next_look = num_updates + 1

    def due(self, num_updates: int) -> bool:
        """Whether to save after update number ``num_updates``, counted from 1."""
        by_updates = bool(
            self._every_updates and num_updates % self._every_updates == 0
        )
        if self._seconds is None or num_updates < self._next_look:
            return by_updates
        return self._look(num_updates) or by_updates

    def _look(self, num_updates: int) -> bool:
        assert self._seconds is not None
        elapsed = self._clock() - self._since
        wait = updates_to_wait(elapsed, self._seconds, num_updates - self._updates_then)
        self._replica.sync()  # what replicas have pending is no part of a collective
        told = self._replica.send(torch.tensor([wait]))
        self._replica.broadcast_([told])
        wait = int(self._replica.fetch([told])[0].item())
        self._next_look = num_updates + max(wait, 1)
        return wait == 0


def updates_to_wait(elapsed: float, seconds: float, num_updates: int) -> int:
    """Updates until the clock is looked at again; 0 if the time has come.

    Half of those that will fit in, at most twice as many as there have been: updates
    may slow down, and the first ones compile.

    >>> updates_to_wait(elapsed=60.0, seconds=600.0, num_updates=100)
    200
    >>> updates_to_wait(elapsed=500.0, seconds=600.0, num_updates=1000)
    100
    >>> updates_to_wait(elapsed=600.0, seconds=600.0, num_updates=1100)
    0
    """
    if elapsed >= seconds:
        return 0
    to_come = (seconds - elapsed) / max(elapsed, 1e-9) * num_updates
    return max(1, int(min(to_come / 2, 2 * num_updates)))
