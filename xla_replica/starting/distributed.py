"""The backends 'cpu' and 'cuda': processes joined by torch.distributed.

They are this package's own, torchrun's, or whatever has initialised a process group.
"""

from __future__ import annotations

import functools
import multiprocessing.connection
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from xla_replica.backends.distributed import DistributedReplica, process_group
from xla_replica.backends.registry import Job, bound, register_backend
from xla_replica.backends.replica import LocalReplica
from xla_replica.errors import ReplicaError
from xla_replica.starting import fresh_processes
from xla_replica.starting.child_processes import cause_of_death, die_with_parent
from xla_replica.starting.exit_results import (
    Ending,
    dump_failure,
    dump_task,
    load,
    raise_failure,
    read_endings,
    run_to_end,
    values,
    write_ending,
)
from xla_replica.stopping import forwarding, listening, listening_for_parent

GROUPS = {"cuda": "nccl", "cpu": "gloo"}


def run_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int,
    device: str,
    timeout: float,
) -> list[Any]:
    """Runs ``fn(rank, *args)`` in processes on this host; returns results by rank.

    Raises:
        ReplicaError: A replica raised or died; the first one to do so.
        Stopped: At least one did, and the others ended well.
    """
    context = fresh_processes.context()
    task = dump_task(fn, args)
    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        processes = [
            context.Process(
                target=_run_replica,
                args=(
                    fresh_processes.Surroundings(),
                    rank,
                    task,
                    num_replicas,
                    device,
                    timeout,
                    folder,
                ),
                name=f"replica-{rank}",
            )
            for rank in range(num_replicas)
        ]
        try:
            with forwarding(folder):
                for process in processes:
                    process.start()
                death = _wait_for_all(processes)
        finally:  # also on Ctrl-C, which may reach this process alone
            for process in processes:
                if process.pid is not None:  # it was started
                    process.kill()
                    process.join()
        endings = read_endings(folder)
        if death is not None or len(endings) < num_replicas:  # or os._exit(0)
            raise_failure(_first_failure(folder, death))
        return values(endings)


def _wait_for_all(processes: Sequence[Any]) -> ReplicaError | None:
    """Waits until all processes have ended well or one has not."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                rank = processes.index(process)
                cause = cause_of_death(process.exitcode)
                return ReplicaError(f"replica {rank} died ({cause})", rank)
    return None


def _first_failure(folder: str, death: ReplicaError | None) -> bytes:
    """What the first replica to fail wrote, or that it died without a word."""
    failures = sorted(
        Path(folder).glob("*.failure"), key=lambda p: p.stat().st_mtime_ns
    )
    if failures:
        return failures[0].read_bytes()
    death = death or ReplicaError("a replica exited before its function returned")
    return dump_failure(death.rank, death)


def _run_replica(
    surroundings: fresh_processes.Surroundings,
    rank: int,
    task: bytes,
    num_replicas: int,
    device: str,
    timeout: float,
    folder: str,
) -> None:
    surroundings.enter()
    die_with_parent()
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_replicas))
    try:
        fn, args = load(task)
        _join_group(
            device,
            timeout,
            init_method=Path(folder, "meeting").as_uri(),
            rank=rank,
            world_size=num_replicas,
        )
        with listening_for_parent(folder):
            ending = _run_in_group(fn, args, device, "a process")
            write_ending(folder, rank, ending)
            _wait_for_peers(rank, timeout)
    except BaseException as error:  # a replica that exits has failed its peers too
        path = Path(folder, f"{rank:06d}")
        path.write_bytes(dump_failure(rank, error))
        path.rename(path.with_suffix(".failure"))  # never read half-written
        sys.exit(1)
    torch.distributed.destroy_process_group()


def _join_group(device: str, timeout: float, **where: Any) -> None:
    """Initialises the default group such that destroying it ends its threads.

    torch.distributed.nn has the default group as default arguments. If it is first
    imported while a group exists (the first torch.optim.Optimizer does, by way of
    torch._dynamo), the group outlives destroy_process_group; a gloo thread that frees
    its last tensor while Python exits then aborts the process, after all its work.
    """
    import torch.distributed.nn  # before there is a group to hold on to

    torch.distributed.init_process_group(
        GROUPS[device], timeout=timedelta(seconds=timeout), **where
    )


def _wait_for_peers(rank: int, timeout: float) -> None:
    """Nobody tears its end down while a peer still sums."""
    try:
        torch.distributed.barrier()
    except RuntimeError as error:
        raise ReplicaError(
            f"replica {rank} returned, but a peer failed or did not return within "
            f"{timeout:g} s: {error}",
            rank,
        ) from error


def run_in_this_process(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int | None,
    device: str,
    timeout: float,
) -> Any:
    """Joins the group of this job if nobody has; runs ``fn(rank, *args)`` right here.

    Raises:
        ValueError: The job has another number of processes.
        Stopped: ``fn`` did, and its peers have ended.
    """
    joined_here = not torch.distributed.is_initialized()
    world_size = (
        int(os.environ["WORLD_SIZE"])
        if joined_here
        else torch.distributed.get_world_size()
    )
    if num_replicas not in (None, world_size):
        raise ValueError(
            f"num_replicas={num_replicas}, but this job has {world_size} processes: "
            "leave num_replicas out or start as many (torchrun --nproc_per_node)"
        )
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if joined_here:
        _join_group(device, timeout)
    try:
        with listening():
            ending = _run_in_group(fn, args, device, "a process of this job")
            if joined_here:
                _wait_for_peers(torch.distributed.get_rank(), timeout)
        [value] = values([ending])
        return value
    finally:
        if joined_here:
            torch.distributed.destroy_process_group()


def _run_in_group(
    fn: Callable[..., Any], args: tuple[Any, ...], device: str, reason: str
) -> Ending:
    index = torch.cuda.current_device() if device == "cuda" else None
    replica = DistributedReplica(reason, torch.device(device, index))
    with bound(replica):
        return run_to_end(fn, replica.rank, args)


# --- the two rows -------------------------------------------------------------------


def _launch_on_cpu(job: Job) -> list[Any]:
    return _launch(job, "cpu", job.num_replicas or 1)


def _launch_on_gpus(job: Job) -> list[Any]:
    num_gpus = torch.cuda.device_count()
    num_replicas = job.num_replicas or num_gpus
    if not 1 <= num_replicas <= num_gpus:
        raise ValueError(
            f"num_replicas={job.num_replicas} on device='cuda', but there are "
            f"{num_gpus} GPUs"
        )
    return _launch(job, "cuda", num_replicas)


def _launch(job: Job, device: str, num_replicas: int) -> list[Any]:
    fn, args, _, timeout, _ = job
    if job.is_started:
        return [run_in_this_process(fn, args, job.num_replicas, device, timeout)]
    if num_replicas > 1:
        return run_processes(fn, args, num_replicas, device, timeout)
    with listening(), bound(LocalReplica(device, reason="launched alone")):
        return [fn(0, *args)]


def _find(is_ours: Callable[[str], bool]) -> str | None:
    group = process_group()
    if group is None or not is_ours(group):
        return None
    return f"torch.distributed is initialised with {group}"


def _gpu_preference(job: Job) -> int:
    group = process_group()
    return 3 if (torch.cuda.is_available() if group is None else group == "nccl") else 0


register_backend(
    "cuda",
    functools.partial(_find, lambda group: group == "nccl"),
    DistributedReplica,
    _launch_on_gpus,
    preference=_gpu_preference,
    has_any_number=lambda: False,
)
register_backend(
    "cpu",  # and every other group, such as TorchTPU's
    functools.partial(_find, lambda group: group not in ("nccl", "xla")),
    DistributedReplica,
    _launch_on_cpu,
    preference=lambda job: 1,
)
