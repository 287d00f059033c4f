"""What replicas in other processes run, and how they ended, sent back through files."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from xla_replica.backends.registry import bound
from xla_replica.backends.replica import Replica
from xla_replica.common.files import unfinished_name, write_whole
from xla_replica.device.device_traits import traits
from xla_replica.errors import ReplicaError, Stopped
from xla_replica.loader_workers import check_workers
from xla_replica.members.entering import as_member

logger = logging.getLogger(__name__)
_failing = threading.Lock()


def run_and_write(
    folder: str,
    called: bytes,
    replica: Callable[[], AbstractContextManager[Replica]],
    rank: int | None = None,
) -> None:
    """Runs a call in a process that exists for it, and writes how it ended.

    Args:
        folder: That of `collect_results`.
        called: What `import_script` has returned. Every replica loads arguments of its
            own, since it may move a model.
        replica: Surrounds the run of the calling thread's replica.
        rank: The replica's, where it is known before.
    """
    try:
        with replica() as here:
            rank = here.rank
            fn, args = pickle.loads(called)
            result = run_replica(here, fn, args)
            here.wait()
            content = _dump(result, "the replica's result cannot be pickled")
            Path(folder, f"{rank:06d}.result").write_bytes(content)
    except BaseException as error:  # a replica that exits has failed its peers too
        fail(folder, rank, error)


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


def values(results: list[Any]) -> list[Any]:
    """Returns the results, or raises the first `Stopped` among them."""
    for result in results:
        if isinstance(result, Stopped):
            raise result
    return results


def _dump(value: Any, failure: str, pickler: Any = pickle.Pickler) -> bytes:
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


def dump_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Returns ``(fn, args)`` as bytes for `import_script`, or raises TypeError.

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
    called = _dump((fn, args), failure)
    if not main and b"__main__" in called:
        by_value = importlib.import_module("cloudpickle").Pickler
        called = _dump((fn, args), failure, by_value)
    return pickle.dumps((main, called))


@contextlib.contextmanager
def main_held_back() -> Iterator[None]:
    """Surrounds the start of processes, which import the script in `import_script`.

    multiprocessing would import it before anything else runs in them, while a script
    that imports torch_xla needs an environment, and names that are in their place.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def import_script(task: bytes) -> bytes:
    """Imports the script that has called `dump_task`; returns the pickled call.

    Raises RuntimeError if the script starts replicas whenever it is imported.
    """
    main, called = pickle.loads(task)
    process = multiprocessing.current_process()
    process._inheriting = True  # by which `launch` and Python recognise such a script
    try:
        spawn.prepare(main)
    finally:
        del process._inheriting
    return called


def returned(folder: str) -> list[int]:
    """Returns the replicas whose results are in the folder."""
    return sorted(int(path.stem) for path in Path(folder).glob("*.result"))


def write_failure(folder: str, rank: int | None, error: BaseException) -> None:
    """Writes what replica ``rank`` raised; None where no single replica is at fault."""
    who = "a process of the replicas" if rank is None else f"replica {rank}"
    trace = "".join(traceback.format_exception(error))
    raised = f"{who} raised {type(error).__name__}: {error}"
    text = f"{raised}\n\nOn host {socket.gethostname()}:\n{trace}"
    content = pickle.dumps((rank, text, None))
    with contextlib.suppress(Exception):  # the exception, if it can be pickled and back
        with_error = _dump((rank, text, error), "")
        pickle.loads(with_error)
        content = with_error
    path = Path(folder, f"{rank}.failure")  # of no rank several may fail at once
    write_whole(unfinished_name(path), lambda file: file.write(content), path)


def fail(folder: str, rank: int | None, error: BaseException) -> NoReturn:
    """Writes what a replica raised, and ends the process at once; the first one counts.

    Its peers would wait, and so may threads that are stuck in native code.
    """
    _failing.acquire()  # for good
    try:
        try:
            with contextlib.suppress(OSError):  # nobody reads any more
                sys.stdout.flush()
                sys.stderr.flush()
            write_failure(folder, rank, error)
        except BaseException as later:  # as of torch's handler, that a worker has died
            write_failure(folder, rank, later)
    finally:
        os._exit(1)


def collect_results(
    folder: str, num_replicas: int, death: ReplicaError | None
) -> list[Any]:
    """Returns all results, or raises the first failure, ``death`` or a `Stopped`.

    A status other than 0 that a replica has passed to ``sys.exit`` is the job's too. 0
    is not: the replica has left its peers, and the job has not ended well.
    """
    failures = sorted(
        Path(folder).glob("*.failure"), key=lambda path: path.stat().st_mtime_ns
    )
    if failures:
        rank, text, error = pickle.loads(failures[0].read_bytes())
        if isinstance(error, ReplicaError):
            raise error
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            logger.warning("replica %s ended the job by sys.exit(%r)", rank, error.code)
            raise error
        raise ReplicaError(text, rank) from error
    paths = sorted(Path(folder).glob("*.result"))
    results = [pickle.loads(path.read_bytes()) for path in paths]
    if death is not None or len(results) < num_replicas:  # os._exit(0) leaves none
        raise death or ReplicaError("a replica exited before its function returned")
    return values(results)
