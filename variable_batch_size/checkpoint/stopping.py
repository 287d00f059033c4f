"""Why a run stops: asked by a poll, and with the same words on every replica."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import xla_replica
from xla_replica import Replica, StopRequest
from xla_replica.common.arguments import check_number

logger = logging.getLogger(__name__)


def agreed_request(replica: Replica) -> StopRequest:
    """Returns the stop request of the first replica that has one. Collective.

    A replica that was not asked itself knows only that others were. All of them need
    the same request: which of them ends the process, and with which exit status, is
    otherwise a matter of chance.

    Call it where at least one replica has been asked to stop.
    """
    requests = replica.all_gather_object(xla_replica.stop_requested())
    return next(request for request in requests if request is not None)


def poll_for_stop(
    poll: Callable[[], str | None], seconds: float, run: Callable[[], object | None]
) -> None:
    """Calls ``poll`` every ``seconds`` until it returns a reason to stop.

    It runs in a daemon thread, so it may take as long as an HTTP request to a metadata
    server does. An exception in it is logged, and it is called again.

    Args:
        poll: Returns a reason to stop, or None.
        seconds: Time between two calls.
        run: A weak reference to what the poll is for; polling ends when it is gone.

    Raises:
        TypeError: ``poll`` is not a function, or ``seconds`` not a number.
        ValueError: ``seconds`` is not positive.
    """
    if not callable(poll):
        raise TypeError(f"stop_poll must be a function, got {poll!r}")
    interval = float(check_number("poll_seconds", seconds, above=0))
    pause = threading.Event()

    def ask() -> None:
        while not pause.wait(interval) and run() is not None:
            try:
                reason = poll()
            except Exception:  # the user's code; training continues without an answer
                logger.exception("stop_poll failed; it is called again")
                continue
            if reason:
                xla_replica.request_stop(str(reason))
                return

    threading.Thread(target=ask, name="stop-poll", daemon=True).start()
