"""Writing a state: at once, or in a thread beside the training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from xla_replica.common.arguments import check_flag
from xla_replica.common.trees import tensors_in

logger = logging.getLogger(__name__)


class Writer:
    """Runs one write at a time, and raises its errors in the training loop.

    It is the seam between a state and the files that it becomes. Before it, replicas
    work together: the state is made, averaged and copied to the host, where nothing
    changes it any more (`detached`). After it, a function without arguments writes
    what this process has and returns its path, if it has written a file. A collective
    in this thread would meet those of the training in another order on every replica,
    so parts that processes write together need a process group of their own.

    Args:
        asynchronous: Write in a thread. A state is held until it is written, and at
            most one: the next `wait` or `start` waits.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = check_flag("asynchronous", asynchronous)
        self._thread = ThreadPoolExecutor(1, "checkpoint-writer")  # idle: no thread yet
        self._running: Future[Path | None] | None = None

    def start(self, write: Callable[[], Path | None]) -> Path | None:
        """Calls ``write`` and returns its path; in a thread: begins to, returns None.

        Raises what ``write`` raises; in a thread, what the one before has raised.
        """
        if not self.asynchronous:
            return write()
        self.wait()
        self._running = self._thread.submit(_logged, write)
        return None

    def check(self) -> None:
        """Raises what the last write has raised, once; does not wait for one."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> Path | None:
        """Returns when nothing is being written: the path of the last write, if any.

        Raises what that has raised, once.
        """
        try:
            return self._running.result() if self._running else None
        except Exception:
            self._running = None
            raise


def detached(state: Any) -> Any:
    """Returns a state with containers of its own and the same tensors."""
    return copy.deepcopy(state, {id(tensor): tensor for tensor in tensors_in(state)})


def _logged(write: Callable[[], Path | None]) -> Path | None:
    try:
        return write()
    except Exception as error:  # the loop raises it, if it comes to ask
        logger.error(f"an asynchronous checkpoint was not written: {error}")
        raise
