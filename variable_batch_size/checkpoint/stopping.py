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

    Call it where at least one has been asked. The others need its reason and exit
    status too: which replica ends the process is a matter of chance.
    """
    requests = replica.all_gather_object(xla_replica.stop_requested())
    return next(request for request in requests if request is not None)


def poll_for_stop(
    poll: Callable[[], str | None], seconds: float, run: Callable[[], object | None]
) -> None:
    """Calls ``poll`` every ``seconds`` until it returns a reason to stop.

    It runs in a daemon thread, so it may take as long as an HTTP request to a metadata
    server does. An exception in it is logged, and it is called again. Polling ends when
    ``run``, a weak reference to what it is for, is gone.
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
