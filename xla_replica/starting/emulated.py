"""The child process in which emulated replicas live, and how their outcome comes back.

The number of XLA:CPU devices is fixed when the runtime starts, and a broken collective
ends the process, so every run has a fresh one. Its results, or the failure of one
replica, come back through a pipe. What each replica was last doing stands in shared
memory, where it outlives an abort.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from xla_replica.backends.registry import bound
from xla_replica.backends.xla import XlaReplica
from xla_replica.emulated import emulator as emulation
from xla_replica.errors import ReplicaError
from xla_replica.starting import fresh_processes
from xla_replica.starting.child_processes import cause_of_death, die_with_parent
from xla_replica.starting.exit_results import (
    Ending,
    dump,
    dump_failure,
    dump_task,
    load,
    raise_failure,
    run_to_end,
    values,
)
from xla_replica.stopping import forwarding, listening_for_parent

# A process whose Python threads have not run for this long holds the interpreter lock
# in native code; starting up (importing torch) may take a good part of it.
FROZEN_AFTER_SECONDS = 60.0
_STATUS_BYTES = 400


def run_emulated(
    fn: Callable[..., Any], args: tuple[Any, ...], num_replicas: int, timeout: float
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on emulated replicas; returns the results by rank.

    Raises:
        Stopped: At least one replica did, and the others ended well.
        ReplicaError: A replica raised, hung, left early or differed from its peers.
        TypeError: ``fn`` or ``args`` cannot be sent to another process.
    """
    payload = dump_task(fn, args)
    context = fresh_processes.context()
    receiver, sender = context.Pipe(duplex=False)
    status = context.RawArray(ctypes.c_char, _STATUS_BYTES * num_replicas)
    heartbeat = context.RawValue(ctypes.c_double, float("inf"))
    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        process = context.Process(
            target=_child_main,
            args=(
                fresh_processes.Surroundings(emulation.environment(num_replicas)),
                sender,
                payload,
                num_replicas,
                timeout,
                status,
                heartbeat,
                folder,
            ),
            name="emulated-replicas",
        )
        message: tuple[bool, bytes] | str = "interrupted"
        with forwarding(folder):
            try:
                process.start()
                sender.close()
                message = _outcome(
                    process, receiver, heartbeat, max(timeout, FROZEN_AFTER_SECONDS)
                )
            finally:
                _end(process, patience=0.0 if isinstance(message, str) else 5.0)
                receiver.close()
    if isinstance(message, str):
        raise ReplicaError(f"{message}. {_last_seen(status, num_replicas)}")
    succeeded, content = message
    if not succeeded:
        raise_failure(content)
    return values(load(content))


def _end(process: Any, patience: float) -> None:
    """Waits for the child to exit, for so many seconds, then kills it."""
    if process.pid is None:  # it was never started
        return
    process.join(patience)
    process.kill()
    process.join()


def _outcome(
    process: Any, receiver: Any, heartbeat: Any, frozen_after: float
) -> tuple[bool, bytes] | str:
    """Whether the child succeeded and what it says, or how it died without a word."""
    while True:
        multiprocessing.connection.wait([receiver, process.sentinel], timeout=1.0)
        exited = process.exitcode is not None  # before polling: its message comes first
        if receiver.poll():
            try:
                return receiver.recv()
            except EOFError:
                process.join()
                exited = True
        if exited:
            code = process.exitcode
            hint = (
                ": XLA aborts when replicas that run different programs have waited "
                "15 s for each other in a collective"
                if code == -6
                else ""
            )
            cause = cause_of_death(code)
            return f"the process of the emulated replicas died ({cause}{hint})"
        if time.monotonic() - heartbeat.value > frozen_after:
            return (
                "the process of the emulated replicas has not run any Python code for "
                f"{frozen_after:g} s: native code holds the interpreter lock"
            )


def _last_seen(status: Any, num_replicas: int) -> str:
    seen = [
        f"replica {rank}: {text or 'not started'}"
        for rank, text in enumerate(_read_status(status, num_replicas))
    ]
    return "Last seen: " + "; ".join(seen)


def _read_status(status: Any, num_replicas: int) -> list[str]:
    raw = bytes(status.raw)
    rows = [
        raw[i * _STATUS_BYTES : (i + 1) * _STATUS_BYTES] for i in range(num_replicas)
    ]
    return [row.split(b"\0", 1)[0].decode(errors="replace") for row in rows]


# --- in the child -------------------------------------------------------------------


def _child_main(
    surroundings: fresh_processes.Surroundings,
    sender: Any,
    payload: bytes,
    num_replicas: int,
    timeout: float,
    status: Any,
    heartbeat: Any,
    folder: str,
) -> None:
    surroundings.enter()
    threading.Thread(target=_beat, args=(heartbeat,), daemon=True).start()
    die_with_parent()
    torch.set_num_threads(1)
    outcome = _Outcome(sender)

    def report(rank: int, text: str) -> None:
        row = text.encode()[: _STATUS_BYTES - 1].ljust(_STATUS_BYTES, b"\0")
        ctypes.memmove(
            ctypes.addressof(status) + rank * _STATUS_BYTES, row, _STATUS_BYTES
        )

    try:
        from torch_xla._internal import pjrt

        emulator = emulation.Emulator(num_replicas, timeout, report)
        # Before the user's module is imported: it may take names from torch_xla.
        emulator.install()
        fn, args = load(payload)
    except BaseException as error:
        outcome.fail(None, error)
    endings: dict[int, bytes] = {}

    def run_replica() -> None:
        rank = None
        try:
            with emulator.replica() as rank:
                report(rank, "computing")
                replica = XlaReplica(f"emulated on the CPU, {num_replicas} threads")
                with bound(replica):
                    ending = run_to_end(fn, rank, args)
                replica.sync()
                endings[rank] = _dump_ending(ending)
        except BaseException as error:
            # At once: peers would wait in a collective until XLA aborts the process.
            outcome.fail(rank, error)

    # This thread waits where it can be interrupted: it runs the signal handlers.
    with listening_for_parent(folder):
        pjrt._run_thread_per_device(0, 1, run_replica, pjrt.initialize_multiprocess)
    outcome.succeed([endings[rank] for rank in range(num_replicas)])


def _dump_ending(ending: Ending) -> bytes:
    try:
        return dump(ending)
    except Exception as error:  # pickle raises many kinds
        raise TypeError(f"the replica's result cannot be pickled: {error}") from error


class _Outcome:
    """Sends the one message of this process."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._once = threading.Lock()

    def succeed(self, endings: list[bytes]) -> None:
        # The normal way out: what the user's code registered for the exit still runs.
        self._send(True, dump([load(ending) for ending in endings]))

    def fail(self, rank: int | None, error: BaseException) -> None:
        self._once.acquire()  # for good: the first failure is the cause
        try:
            self._send(False, dump_failure(rank, error))
        finally:
            # Not sys.exit: threads may be stuck in native code for ever.
            os._exit(1)

    def _send(self, succeeded: bool, content: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        self._sender.send((succeeded, content))
        self._sender.close()


def _beat(heartbeat: Any) -> None:
    while True:
        heartbeat.value = time.monotonic()
        time.sleep(0.5)
