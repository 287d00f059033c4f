"""Workers of torch's loaders, which outlive a signal to all processes of a job.

A terminal and torchrun signal the process group, and a machine that shuts down (as
Slurm may) every process. A worker that dies of it ends the training that has just been
asked to save. So where a process catches signals, the workers of its loaders block
them from their first instruction on; the one that asks a worker to end, torch's own,
comes from its parent.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils import signal_handling, worker

_Iterator = dataloader._MultiProcessingDataLoaderIter
_torch_begin, _torch_main = _Iterator.__init__, worker._worker_loop
_torch_handlers = signal_handling._set_worker_signal_handlers
_HAS_SENDER = hasattr(signal, "sigwaitinfo")  # of a signal; on Linux


def leave_signals_to_parent(
    worker_id: int = 0, signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT)
) -> None:
    """Makes this process ignore signals unless its parent sends them, on Linux.

    Workers of torch's ``DataLoader`` do so by themselves where signals are caught.
    Others, such as spawned ones of torchdata, need it as ``worker_init_fn=``.
    """
    del worker_id
    if _HAS_SENDER:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        for number in signals:  # threads that were there before do not block it
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_when_told, args=(signals,), daemon=True).start()


def _end_when_told(signals: Iterable[int]) -> None:
    """Ends this process at a signal of its parent's, as torch's own handler does."""
    parent = multiprocessing.parent_process()  # also where a server has forked this
    boss = os.getppid() if parent is None else parent.pid
    while signal.sigwaitinfo(signals).si_pid != boss:
        pass
    os._exit(0)


def spare_workers(signals: frozenset[int]) -> None:
    """Has loaders that begin from now on start workers that ignore ``signals``."""
    if not _HAS_SENDER:
        return
    main, handlers = _torch_main, _torch_handlers
    if signals:
        # Pickled, `main` takes this module to processes that are not forked.
        main = functools.partial(_main, signals)
        handlers = functools.partial(_set_handlers, signals)  # also torchdata calls it
    worker._worker_loop, signal_handling._set_worker_signal_handlers = main, handlers

    @functools.wraps(_torch_begin)
    def begin(*args: Any) -> None:
        resource_tracker.ensure_running()  # which would unblock signals
        # Workers inherit this, and so does a server that is started to fork them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            _torch_begin(*args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    _Iterator.__init__ = begin if signals else _torch_begin


def _main(signals: frozenset[int], *args: Any) -> None:
    """Is a worker's whole life, in its process."""
    spare_workers(signals)
    _torch_main(*args)


def _set_handlers(signals: frozenset[int]) -> None:
    _torch_handlers()
    leave_signals_to_parent(signals=signals)
