"""When to save and why to stop: the same on every replica."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import xla_replica
from xla_replica import Replica, StopRequest
from xla_replica.common.arguments import check_fields, checked

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class SaveTimes:
    """Says when to save, and what to keep; see `Checkpointer` for the arguments.

    Minutes are those of replica 0's clock, which tells the others at updates that are
    an eighth further from the last save each time: between these nothing is sent or
    read.
    """

    replica: Replica
    every_updates: int | None = checked(None, least=1)
    every_minutes: float | None = checked(None, above=0)
    keep: int = checked(3, least=1)
    look_every_seconds: float = checked(2.0, above=0)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every_updates is None and self.every_minutes is None:
            self.every_minutes = 10.0
        self.saved(0)

    def saved(self, num_updates: int) -> None:
        """Notes that a checkpoint of so many updates was saved or loaded just now."""
        self._since = self.clock()
        self.look_from(num_updates)

    def look_from(self, num_updates: int) -> None:
        """Looks after the next update, and then more and more seldom."""
        self._first, self._next_look = num_updates, num_updates + 1

    def due(self, num_updates: int) -> bool:
        """Returns whether to save after an update; collective where it looks."""
        updates, minutes = self.every_updates, self.every_minutes
        is_due = updates is not None and num_updates % updates == 0
        if minutes is None or num_updates < self._next_look:
            return is_due
        is_late = self.clock() - self._since >= 60 * minutes
        is_late = self.replica.all_gather_object(is_late)[0]
        self._next_look = num_updates + 1 + (num_updates - self._first) // 8
        return is_due or is_late


def listen(signals: Sequence[str | int] = ("SIGTERM", "SIGINT")) -> None:
    """Has signals ask this run to stop, where that is possible."""
    try:
        xla_replica.catch_signals(signals)
    except RuntimeError as error:  # for instance in a thread of another library
        logger.warning(f"signals will not ask this run to stop: {error}")


def agreed_request(replica: Replica) -> StopRequest:
    """Returns the stop request of the first replica that has one. Collective.

    All need its exit status: which replica ends the process is a matter of chance.
    """
    own = xla_replica.stop_requested()
    requests = replica.gather_at_rest(own)  # in a live run all members have one
    return next(request for request in requests if request is not None)
