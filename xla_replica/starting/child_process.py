"""Child processes that run replicas, forked from one that has torch imported.

Importing torch, with what torch_xla and optimizers import of it, takes three seconds of
a processor's time, in every process of every run. So children are forked from a server
(Python's own, its default on Linux since 3.14) that only imports: no device, no group
and no lock is inherited. What a process that was spawned would have from its parent is
sent along (`_Surroundings`).
"""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, forkserver, reduction, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from xla_replica.errors import ReplicaError
from xla_replica.starting import exit_results
from xla_replica.stopping import SIGNALS, forwarding

_IMPORTED = [
    "torch",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.nn",
]
# Most of what importing torch_xla takes: a part of torch for its bridge to dynamo.
_IMPORTED_BY_TORCH_XLA = "torch._inductor.fx_passes.post_grad"
# A signal to the process group is meant for the replicas too. The server, in the same
# group, must outlive them, because it reports how they ended.
_FOR_REPLICAS = frozenset(SIGNALS) - {signal.SIGINT}  # which it ignores
_FILES = (1, 2)


def run_in_children(
    main: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    watch: Callable[[Sequence[BaseProcess], str], ReplicaError | None],
    num_replicas: int,
    variables: Mapping[str, str] | None = None,
    start_method: str = "forkserver",
) -> list[Any]:
    """Runs replicas in child processes and returns or raises as `collect_results` does.

    Child n calls ``main(folder, *arguments[n])``, where the folder is shared for
    `exit_results` and `forwarding`; an exception that it raises ends the run. It
    imports the script by `exit_results.import_script`. ``watch(processes, folder)``
    returns when the replicas have ended, with the error if they ended badly; a process
    that still runs is then killed. ``variables`` are set in the environment of the
    children alone.
    ``start_method`` is "spawn" for a runtime that does not survive a fork and that
    importing torch loads.
    """
    context = _context(start_method)
    surroundings = _Surroundings(variables, context.get_start_method())
    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        processes = [
            context.Process(
                target=_run_child,
                args=(surroundings, len(arguments), main, folder, *own),
            )
            for own in arguments
        ]
        try:
            with forwarding(folder):
                with exit_results.main_held_back():
                    for process in processes:
                        process.start()
                death = watch(processes, folder)
        finally:  # also on Ctrl-C, which may reach this process alone
            for process in processes:
                if process.pid is not None:  # it was started
                    process.kill()
                    process.join()
        return exit_results.collect_results(folder, num_replicas, death)


def first_death(
    name: Callable[[int], str],
    processes: Sequence[BaseProcess],
    has_returned: Callable[[int], bool],
    late: Callable[[], ReplicaError | None] = lambda: None,
    aborts: str = "",
) -> ReplicaError | None:
    """Waits until all processes have ended well; returns how the first one has not.

    Args:
        name: Returns what errors call the process of a number, their ``rank``.
        processes: In the order of their numbers.
        has_returned: Asked about a process that has ended without an error.
        late: Asked about once a second; an error that it returns ends the wait.
        aborts: Why a process aborts, for people.
    """
    running = {process.sentinel: number for number, process in enumerate(processes)}
    while running:
        ended = connection.wait(list(running), 1.0)
        error = late()
        for sentinel in ended:
            number = running.pop(sentinel)
            process = processes[number]
            process.join()
            if process.exitcode != 0:
                cause = cause_of_death(process.exitcode, aborts)
                return ReplicaError(f"{name(number)} died ({cause})", number)
            if not has_returned(number):  # os._exit(0), or native code
                early = f"{name(number)} exited before its function returned"
                return ReplicaError(early, number)
        if error is not None:
            return error
    return None


def _run_child(
    surroundings: _Surroundings,
    num_processes: int,
    main: Callable[..., None],
    folder: str,
    *own: Any,
) -> None:
    """Calls ``main`` in the child, which has the parent's surroundings and its end."""
    surroundings.enter()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_processes))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        main(folder, *own)
    except BaseException as error:
        exit_results.fail(folder, None, error)


def _end_with_parent() -> None:
    """Ends this process as soon as its parent has ended, for whatever reason."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def cause_of_death(exit_code: int, aborts: str = "") -> str:
    """Returns a ``Process.exitcode`` in words, and why a process ``aborts``."""
    if exit_code == -signal.SIGABRT and aborts:
        return f"signal {-exit_code}: {aborts}"
    return f"signal {-exit_code}" if exit_code < 0 else f"exit status {exit_code}"


def _context(start_method: str) -> BaseContext:
    """Returns what starts processes that must begin with `_Surroundings.enter`."""
    if not hasattr(signal, "pthread_sigmask"):
        raise NotImplementedError("on Windows train with num_replicas=1, or under WSL")
    # Other systems: forking after an import is not always safe there.
    if start_method == "spawn" or sys.platform != "linux":
        return mp.get_context("spawn")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_REPLICAS)
    try:
        resource_tracker.ensure_running()  # which unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_REPLICAS)
        has_xla = importlib.util.find_spec("torch_xla") is not None
        more = [_IMPORTED_BY_TORCH_XLA] if has_xla else []
        forkserver.set_forkserver_preload([*_IMPORTED, *more])
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return mp.get_context("forkserver")


class _Surroundings:
    """The environment, start method and output files of this process, for a child."""

    def __init__(self, variables: Mapping[str, str] | None, start_method: str) -> None:
        self._variables = {**os.environ, **(variables or {})}
        self._files: list[Any] = []
        # What the script has chosen (None: nothing), which its loaders' workers start
        # by. A child that is spawned because it cannot be forked spawns them, too.
        self._start_method: str | None = start_method
        if start_method != "spawn":
            self._start_method = mp.get_start_method(allow_none=True)

    def __getstate__(self) -> dict[str, Any]:
        files = [reduction.DupFd(number) for number in _FILES]
        return {**vars(self), "_files": files}

    def enter(self) -> None:
        """Makes them this process's own, and unblocks signals."""
        os.environ.clear()
        os.environ.update(self._variables)
        mp.set_start_method(self._start_method, force=True)
        for number, file in zip(_FILES, self._files):
            received = file.detach()
            if received != number:  # a spawned process has it already
                os.dup2(received, number)
                os.close(received)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_REPLICAS)
