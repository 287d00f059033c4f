"""Asks now and then, beside the training, whether the machine will go away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import xla_replica
from xla_replica.common.arguments import check_number

logger = logging.getLogger(__name__)


def poll_for_stop(
    poll: Callable[[], str | None], seconds: float, run: Callable[[], object | None]
) -> None:
    """Calls ``poll`` every so many seconds until it returns a reason to stop.

    Or until ``run``, a weak reference to what it is for, has nothing to refer to.

    In a daemon thread: it may take its time, as an HTTP request to a metadata server
    does. An exception in it is logged, and it is called again.

    Raises:
        TypeError, ValueError: ``poll`` is no function or ``seconds`` not positive.
    """
    if not callable(poll):
        raise TypeError(f"stop_poll must be a function, got {poll!r}")
    pause = threading.Event()
    interval = check_number("poll_seconds", seconds, above=0)

    def ask() -> None:
        while not pause.wait(interval) and run() is not None:
            try:
                reason = poll()
            except Exception:  # the user's code; training goes on without an answer
                logger.exception("stop_poll failed; it is called again")
                continue
            if reason:
                xla_replica.request_stop(str(reason))
                return

    threading.Thread(target=ask, name="stop-poll", daemon=True).start()
