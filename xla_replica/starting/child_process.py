"""Child processes that run replicas, of every runtime: start, watch, end, results.

Importing torch, with what torch_xla and optimizers import of it, takes three seconds of
a processor's time, in every process of every run. So children are forked from a server
(Python's own, its default on Linux since 3.14) that only imports: no device, no group
and no lock is inherited. The environment that the parent has now is sent along, and the
script is imported, or its functions sent. How replicas ended comes back in files of a
folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import multiprocessing as mp
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing import connection, forkserver, spawn
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from xla_replica.backends.registry import Job, bound
from xla_replica.backends.replica import Replica
from xla_replica.common.arguments import check_choice
from xla_replica.common.files import unfinished_name, write_whole
from xla_replica.device.device_traits import traits
from xla_replica.errors import ReplicaError, Stopped
from xla_replica.loader_workers import blocked, check_workers
from xla_replica.members.member_replica import as_member
from xla_replica.stopping import SIGNALS, forwarding, listening

logger = logging.getLogger(__name__)

_IMPORTED = ["torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed.nn"]
# Most of what importing torch_xla takes: a part of torch for its bridge to dynamo.
_IMPORTED_BY_TORCH_XLA = "torch._inductor.fx_passes.post_grad"
# A signal to the process group is meant for the replicas too. The server, in the same
# group, must outlive them, because it reports how they ended.
_FOR_REPLICAS = frozenset(SIGNALS) - {signal.SIGINT}  # which it ignores
_failing = threading.Lock()


class Runtime:
    """What differs between the runtimes of replicas in child processes.

    The children have a copy. Here it is that of processes which are a replica each.

    Attributes:
        num_replicas: How many results there are if all goes well.
        num_processes: How many children.
        timeout: Seconds that a replica may be late.
        start_method: "spawn" for a runtime that does not survive a fork and that
            importing torch loads.
        variables: Set in the environment of the children alone.
        causes: Why a process ends, for people, by its ``exitcode``.
    """

    start_method = "forkserver"
    variables: Mapping[str, str] = {}
    causes: Mapping[int, str] = {}

    def __init__(self, num_replicas: int, timeout: float) -> None:
        self.num_replicas = self.num_processes = num_replicas
        self.timeout = timeout

    # --- in the parent --------------------------------------------------------------

    def death(self, how: str, *numbers: int) -> ReplicaError:
        """Returns the error that says ``how`` the process of this number has ended."""
        return ReplicaError(f"replica {numbers[0]} {how}", numbers[0])

    def late(self) -> ReplicaError | None:
        """Returns the error that ends the run of late replicas; asked every second."""
        return None

    # --- in the child ---------------------------------------------------------------

    def prepare(self, number: int) -> None:
        """Does what must be done before the script is imported."""

    def run(self, number: int, run: Callable[[], None]) -> None:
        """Calls ``run`` in the thread of every replica of this process."""
        run()

    def replica(self, number: int, folder: str) -> AbstractContextManager[Replica]:
        """Returns what surrounds the run of the calling thread's replica.

        All children share the ``folder``.
        """
        raise NotImplementedError


# --- in the parent --------------------------------------------------------------------


def run_in_children(
    runtime: Runtime, fn: Callable[..., Any], args: tuple[Any, ...]
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on replicas in child processes; see `launch`.

    Returns or raises as `_results` does. The first child that raises, ends
    badly or is late ends the run, and the others are killed.
    """
    context, task = _context(runtime.start_method), _dump_task(fn, args)
    # By which loaders' workers start: what the script has chosen (None: nothing). A
    # child that is spawned because it cannot be forked spawns them, too.
    spawns = runtime.start_method == "spawn"
    workers = "spawn" if spawns else mp.get_start_method(allow_none=True)
    surroundings = {**os.environ, **runtime.variables}, workers
    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        processes: list[BaseProcess] = []
        # They end also on Ctrl-C, which may reach this process alone.
        with contextlib.ExitStack() as ended, forwarding(folder):
            with _main_held_back():
                for number in range(runtime.num_processes):
                    own = surroundings, runtime, folder, task, number
                    process = context.Process(target=_run_child, args=own)
                    process.start()
                    processes.append(process)
                    ended.callback(process.join)
                    ended.callback(process.kill)
            death = _first_death(runtime, processes, folder)
        return _results(folder, runtime.num_replicas, death)


def _first_death(
    runtime: Runtime, processes: Sequence[BaseProcess], folder: str
) -> ReplicaError | None:
    """Returns how the first process ends without a word, None if all say how they end.

    A collective may fail before the system reports the death that it fails by: after
    such a failure the others have a second.
    """
    running = {process.sentinel: number for number, process in enumerate(processes)}
    while running:
        ended, late = connection.wait(list(running), 1.0), runtime.late()
        for number in map(running.pop, ended):
            processes[number].join()
            code = processes[number].exitcode
            said = {path.suffix for path in Path(folder).glob(f"*.{number}.[rf]*")}
            if code and ".failure" not in said:
                kind = "exit status" if code > 0 else "signal"
                cause = f": {runtime.causes[code]}" if code in runtime.causes else ""
                return runtime.death(f"died ({kind} {abs(code)}{cause})", number)
            if not said:  # as by os._exit(0)
                return runtime.death("exited before its function returned", number)
        _, _, error = failure = _first_failure(folder)
        if any(failure) and not (ended and isinstance(error, ReplicaError)):
            return None
        if late is not None and not any(failure):
            return late
    return None


def _first_failure(folder: str) -> tuple[int | None, str, BaseException | None]:
    """Returns the rank, the text and, if it can be sent, the exception; or nothing."""
    paths = sorted(Path(folder).glob("*.failure"))
    return pickle.loads(paths[0].read_bytes()) if paths else (None, "", None)


def _results(folder: str, num_replicas: int, death: ReplicaError | None) -> list[Any]:
    """Returns all results, or raises the first failure, ``death`` or a `Stopped`.

    A status other than 0 that a replica has passed to ``sys.exit`` is the job's too. 0
    is not: the replica has left its peers, and the job has not ended well.
    """
    rank, text, error = _first_failure(folder)
    if isinstance(error, ReplicaError):
        raise death or error
    if isinstance(error, SystemExit) and error.code not in (None, 0):
        logger.warning("replica %s ended the job by sys.exit(%r)", rank, error.code)
        raise error
    if text:
        raise ReplicaError(text, rank) from error
    paths = sorted(Path(folder).glob("*.result"))
    results = [pickle.loads(path.read_bytes()) for path in paths]
    if death is not None or len(results) < num_replicas:  # os._exit(0) leaves none
        raise death or ReplicaError("a replica exited before its function returned")
    return values(results)


def values(results: list[Any]) -> list[Any]:
    """Returns the results, or raises the first `Stopped` among them."""
    for result in results:
        if isinstance(result, Stopped):
            raise result
    return results


# --- in the child, or in a process that is a replica already --------------------------


def run_here(job: Job, replica: AbstractContextManager[Replica]) -> list[Any]:
    """Runs a job's function as the replica that this process is; see `launch`."""
    with listening(), replica as here:
        check_choice("num_replicas", job.num_replicas, [here.num_replicas, None])
        result = run_replica(here, job.fn, job.args)
        here.wait()
    return values([result])


def run_replica(replica: Replica, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs ``fn`` as the calling thread's replica, its `current`, or as a member's.

    Returns ``fn(rank, *args)``, or the `Stopped` that it raises: both end well.
    """
    with bound(as_member(replica)):
        try:
            return fn(replica.rank, *args)
        except Stopped as stopped:
            return stopped
        except (ConnectionError, EOFError) as error:
            check_workers(error)
            raise


def _run_child(
    surroundings: Any, runtime: Runtime, folder: str, task: bytes, number: int
) -> None:
    """Runs the replicas of a child, which has the parent's environment and its end."""
    variables, start_method = surroundings
    os.environ.clear()
    os.environ.update(variables)
    mp.set_start_method(start_method, force=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_REPLICAS)  # blocked by the server
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // runtime.num_processes))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        runtime.prepare(number)
        called = _import_script(task)
        # This thread waits where it can be interrupted: it runs the signal handlers.
        with listening(folder):
            runtime.run(number, lambda: _run_replica(runtime, folder, called, number))
    except BaseException as error:
        _fail(folder, number, None, error)


def _run_replica(runtime: Runtime, folder: str, called: bytes, number: int) -> None:
    """Runs a call as the calling thread's replica, and writes how it ended.

    Every replica loads arguments of its own, since it may move a model.
    """
    rank = None
    try:
        with runtime.replica(number, folder) as replica:
            rank = replica.rank
            result = run_replica(replica, *pickle.loads(called))
            replica.wait()
            content = dump(result, "its result cannot be pickled")
            Path(folder, f"{rank:06d}.{number}.result").write_bytes(content)
    except BaseException as error:  # a replica that exits has failed its peers too
        _fail(folder, number, rank, error)


def _report(folder: str, number: int, rank: int | None, error: BaseException) -> None:
    """Writes what replica ``rank`` raised; None where no single replica is at fault."""
    who = "a process of the replicas" if rank is None else f"replica {rank}"
    trace = "".join(traceback.format_exception(error))
    raised = f"{who} raised {type(error).__name__}: {error}"
    text = f"{raised}\n\nOn host {socket.gethostname()}:\n{trace}"
    content = pickle.dumps((rank, text, None))
    with contextlib.suppress(Exception):  # the exception, if it can be pickled and back
        with_error = dump((rank, text, error), "")
        pickle.loads(with_error)
        content = with_error
    path = Path(folder, f"{time.time_ns()}.{number}.failure")
    write_whole(unfinished_name(path), lambda file: file.write(content), path)


def _fail(folder: str, number: int, rank: int | None, error: BaseException) -> NoReturn:
    """Writes what a replica raised, and ends the process at once; the first one counts.

    Its peers would wait, and so may threads that are stuck in native code.
    """
    _failing.acquire()  # for good
    try:
        with contextlib.suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        _report(folder, number, rank, error)
    except BaseException as later:  # as of torch's handler, that a worker has died
        _report(folder, number, rank, later)
    finally:
        os._exit(1)


def _end_with_parent() -> None:
    """Ends this process as soon as its parent has ended, for whatever reason."""
    parent: Any = mp.parent_process()
    parent.join()
    os._exit(1)


# --- what children are sent -----------------------------------------------------------


def dump(value: Any, failure: str, pickler: Any = pickle.Pickler) -> bytes:
    """Returns ``value`` as bytes that any process can unpickle, or raises TypeError.

    Tensors of any device, also inside modules, become tensors on the CPU.
    """

    class Pickler(pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is torch.Tensor and not traits(obj).is_host:
                return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            usual = getattr(super(), "reducer_override", lambda obj: NotImplemented)
            return usual(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # pickle raises many kinds
        raise TypeError(f"{failure}: {error}") from error
    return buffer.getvalue()


def _dump_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Returns ``(fn, args)`` as bytes for `_import_script`, or raises TypeError.

    Where the script is not a file (a notebook, ``python -c``, standard input), its
    functions and classes are sent themselves, by cloudpickle.
    """
    # What multiprocessing sends its own children, here about the script alone.
    data = spawn.get_preparation_data("")
    main = {name: data[name] for name in data if name.startswith("init_main_")}
    if not Path(main.get("init_main_from_path", __file__)).is_file():
        main = {}  # standard input has a name
    failure = (
        f"launch: {fn!r} and its arguments must be picklable, because replicas run in "
        "another process: pass a function defined at the top level of a module"
    )
    called = dump((fn, args), failure)
    if not main and b"__main__" in called:
        by_value = importlib.import_module("cloudpickle").Pickler
        called = dump((fn, args), failure, by_value)
    return pickle.dumps((main, called))


@contextlib.contextmanager
def _main_held_back() -> Iterator[None]:
    """Surrounds the start of processes, which import the script in `_import_script`.

    multiprocessing would import it before anything else runs in them, while a script
    that imports torch_xla needs an environment, and names that are in their place.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _import_script(task: bytes) -> bytes:
    """Imports the script that has called `_dump_task`; returns the pickled call.

    Raises RuntimeError if the script starts replicas whenever it is imported.
    """
    main, called = pickle.loads(task)
    process = mp.current_process()
    process._inheriting = True  # by which `launch` and Python recognise such a script
    try:
        spawn.prepare(main)
    finally:
        del process._inheriting
    return called


def _context(start_method: str) -> BaseContext:
    """Returns what starts processes, some with a few signals blocked."""
    if not hasattr(signal, "pthread_sigmask"):
        raise NotImplementedError("on Windows train with num_replicas=1, or under WSL")
    # Other systems: forking after an import is not always safe there.
    if start_method == "spawn" or sys.platform != "linux":
        return mp.get_context("spawn")
    with blocked(_FOR_REPLICAS):
        has_xla = importlib.util.find_spec("torch_xla") is not None
        more = [_IMPORTED_BY_TORCH_XLA] if has_xla else []
        forkserver.set_forkserver_preload([*_IMPORTED, *more])
        forkserver.ensure_running()
    return mp.get_context("forkserver")
