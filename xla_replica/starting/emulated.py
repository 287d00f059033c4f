"""The child process in which emulated replicas are threads, and how it is watched.

The number of XLA:CPU devices is fixed when the runtime starts, and a broken collective
ends the process, so every run has a new one. What each replica was last doing is kept
in shared memory, where it outlives an abort.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

import torch

from xla_replica.backends.xla import XlaReplica
from xla_replica.emulated.emulator import Emulator, environment
from xla_replica.errors import ReplicaError
from xla_replica.starting import child_process, exit_results
from xla_replica.stopping import listening_for_parent

# A process whose Python threads have not run for this long holds the interpreter lock
# in native code; starting up (importing torch) may take a good part of it.
FROZEN_AFTER_SECONDS = 60.0
# What exit handlers may take once all results are there.
EXIT_SECONDS = 5.0
_STATUS_BYTES = 400


class _Shared:
    """Memory shared with the child: what each replica was last doing, and a clock."""

    def __init__(self, num_replicas: int, timeout: float) -> None:
        self.num_replicas, self.timeout = num_replicas, timeout
        self._frozen_after = max(timeout, FROZEN_AFTER_SECONDS)
        # When the child last ran Python code, by time.monotonic.
        self._heartbeat = RawValue(ctypes.c_double, float("inf"))
        self._rows = [
            RawArray(ctypes.c_char, _STATUS_BYTES) for _ in range(num_replicas)
        ]

    def report(self, rank: int, text: str) -> None:
        """Keeps what replica ``rank`` is doing now."""
        self._rows[rank].value = text.encode()[: _STATUS_BYTES - 1]

    def beat(self) -> None:
        """Keeps the time, twice a second, for as long as the process lives."""
        while True:
            self._heartbeat.value = time.monotonic()
            time.sleep(0.5)

    def _last_seen(self) -> str:
        """Returns what every replica was last doing, in words."""
        texts = [row.value.decode(errors="replace") for row in self._rows]
        return "Last seen: " + "; ".join(
            f"replica {rank}: {text or 'not started'}"
            for rank, text in enumerate(texts)
        )

    def watch(
        self, processes: Sequence[BaseProcess], folder: str
    ) -> ReplicaError | None:
        """Waits until all results are there, or returns how the child has failed."""
        [process] = processes
        is_running = True
        while len(exit_results.returned(folder)) < self.num_replicas:
            if not is_running:
                return self._death(process)
            if time.monotonic() - self._heartbeat.value > self._frozen_after:
                return ReplicaError(
                    "the process of the emulated replicas has not run any Python code "
                    f"for {self._frozen_after:g} s: native code holds the interpreter "
                    f"lock. {self._last_seen()}"
                )
            process.join(1.0)
            is_running = process.is_alive()
        process.join(EXIT_SECONDS)
        return None

    def _death(self, process: BaseProcess) -> ReplicaError:
        """Returns the error that says how the process has ended without all results."""
        aborts = (
            "XLA aborts when replicas that run different programs have waited 15 s for "
            "each other in a collective"
        )
        cause = child_process.cause_of_death(process.exitcode, aborts)
        return ReplicaError(
            f"the process of the emulated replicas died ({cause}). {self._last_seen()}"
        )


def run_emulated(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int,
    timeout: float,
    prepare: Callable[[], None] | None = None,
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on emulated replicas; returns or raises as `launch`.

    The child calls ``prepare`` before it imports the user's modules.
    """
    shared = _Shared(num_replicas, timeout)
    task = exit_results.dump_task(fn, args)
    return child_process.run_in_children(
        _child_main,
        [(task, shared, prepare)],
        shared.watch,
        num_replicas,
        environment(num_replicas),
    )


# --- in the child -------------------------------------------------------------------


def _child_main(
    folder: str, task: bytes, shared: _Shared, prepare: Callable[[], None] | None
) -> None:
    """Runs all replicas in threads, and writes their results or the first failure."""
    threading.Thread(target=shared.beat, daemon=True).start()
    torch.set_num_threads(1)
    emulator = Emulator(shared.num_replicas, shared.timeout, shared.report)
    # Before the user's module is imported: it may take names from torch_xla.
    emulator.install()
    if prepare is not None:
        prepare()
    called = exit_results.import_script(task)

    @contextlib.contextmanager
    def emulated() -> Iterator[XlaReplica]:
        with emulator.replica() as rank:
            shared.report(rank, "computing")
            yield XlaReplica(f"emulated on the CPU, {shared.num_replicas} threads")

    run_threads(folder, called, emulated)


def run_threads(
    folder: str,
    called: bytes,
    replica: Callable[[], AbstractContextManager[XlaReplica]],
    index: int = 0,
    number: int = 1,
    alone: bool = False,
) -> None:
    """Runs the replicas of process ``index`` of ``number`` in threads, as torch_xla.

    See `exit_results.run_and_write`. With ``alone`` it takes a chip and has no peers.
    """
    from torch_xla._internal import pjrt

    def start(*place: int) -> None:
        if alone:
            pjrt.initialize_singleprocess()
        else:
            pjrt.initialize_multiprocess(*place)

    run = functools.partial(exit_results.run_and_write, folder, called, replica)
    # This thread waits where it can be interrupted: it runs the signal handlers.
    with listening_for_parent(folder):
        pjrt._run_thread_per_device(index, number, run, start)
