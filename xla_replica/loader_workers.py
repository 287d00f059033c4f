"""Workers of loaders, which outlive a signal to all processes of a job.

A terminal and torchrun signal the process group, and a machine that shuts down (as
Slurm may) every process. A worker that dies of it ends the training that has just been
asked to save. So where a process catches signals, the workers of its loaders block
them, from their first instruction on and however they are started.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.worker import ManagerWatchdog


def spare_workers(signals: frozenset[int]) -> None:
    """Has loaders that begin from now on start workers that block ``signals``."""
    iterators: list[Any] = [dataloader._MultiProcessingDataLoaderIter]
    torchdata = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    if torchdata is not None:
        iterators.append(torchdata._StatefulMultiProcessingDataLoaderIter)
    for iterator in iterators:
        begin = getattr(iterator.__init__, "__wrapped__", iterator.__init__)
        blocks = signals and hasattr(signal, "pthread_sigmask")
        iterator.__init__ = _with_signals_blocked(begin, signals) if blocks else begin


@functools.cache
def watch_parents() -> None:
    """Has forked workers end also if their parent dies amid the fork.

    torch's own watch takes for the parent whoever it is when the worker begins.
    """
    kind: Any = ManagerWatchdog
    begin, parents = kind.__init__, deque([os.getpid()], 1)

    def watch(watchdog: Any) -> None:
        begin(watchdog)
        watchdog.manager_pid = parents[0]

    os.register_at_fork(before=lambda: parents.append(os.getpid()))
    kind.__init__ = watch


def check_workers(error: BaseException) -> None:
    """Raises RuntimeError if an exception says that a loader's worker has died.

    torch's own handler of SIGCHLD, which would, is installed in main threads alone.
    """
    frames = traceback.walk_tb(error.__traceback__)
    # Where an iterator of torch's, or torchdata's, asks its workers' queue.
    if any(frame.f_code.co_name == "_try_get_data" for frame, _ in frames):
        raise RuntimeError(
            f"a worker of a DataLoader has died ({type(error).__name__}): it was "
            "killed, as where memory runs out (dmesg says so), or has ended itself"
        ) from error


@contextlib.contextmanager
def blocked(signals: frozenset[int]) -> Iterator[None]:
    """Blocks signals in this thread, and in the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        resource_tracker.ensure_running()  # which unblocks some
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _with_signals_blocked(
    begin: Callable[..., None], signals: frozenset[int]
) -> Callable[..., None]:
    """Returns ``begin``, which starts an iterator's workers, such that they block."""

    @functools.wraps(begin)
    def begin_blocked(iterator: Any, *args: Any) -> None:
        try:
            with blocked(signals):
                begin(iterator, *args)
        finally:
            for worker in getattr(iterator, "_workers", ()):
                process = worker._popen
                process.terminate = functools.partial(_end, id(iterator), process.kill)

    return begin_blocked


def _end(iterator: int, kill: Callable[[], None]) -> None:
    """Ends a worker that blocks SIGTERM, in place of ``terminate``."""
    with contextlib.suppress(ValueError):  # torch no longer watches it
        signal_handling._remove_worker_pids(iterator)  # else torch takes it for a crash
    kill()
