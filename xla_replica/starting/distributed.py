"""The backends 'cpu' and 'cuda': processes joined by torch.distributed.

`launch` starts them, or torchrun or another launcher has.
"""

from __future__ import annotations

import functools
import multiprocessing.connection
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from xla_replica.backends.distributed import DistributedReplica, process_group
from xla_replica.backends.registry import Job, bound, register_backend
from xla_replica.backends.replica import LocalReplica
from xla_replica.errors import ReplicaError
from xla_replica.starting import child_process, exit_results
from xla_replica.stopping import listening, listening_for_parent

GROUPS = {"cuda": "nccl", "cpu": "gloo"}


def _launch(device: str, job: Job) -> list[Any]:
    num_gpus = torch.cuda.device_count()
    num_replicas = job.num_replicas or (num_gpus if device == "cuda" else 1)
    if device == "cuda" and not 1 <= num_replicas <= num_gpus:
        raise ValueError(
            f"num_replicas={job.num_replicas} on device='cuda', but there are "
            f"{num_gpus} GPUs"
        )
    if job.is_started:
        return [_run_here(job, device)]
    if num_replicas == 1:
        with listening(), bound(LocalReplica(device, reason="launched alone")):
            return [job.fn(0, *job.args)]
    task = exit_results.dump_task(job.fn, job.args)
    arguments = {
        f"replica-{rank}": (rank, task, num_replicas, device, job.timeout)
        for rank in range(num_replicas)
    }
    return child_process.run_in_children(_child_main, arguments, _watch, num_replicas)


def _watch(processes: Sequence[BaseProcess], folder: str) -> ReplicaError | None:
    """Waits until all processes have ended well, or returns how one has not."""
    del folder
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                rank = processes.index(process)
                cause = child_process.cause_of_death(process.exitcode)
                return ReplicaError(f"replica {rank} died ({cause})", rank)
    return None


def _child_main(
    folder: str, rank: int, task: bytes, num_replicas: int, device: str, timeout: float
) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_replicas))
    try:
        fn, args = pickle.loads(task)
        _join_group(
            device,
            timeout,
            init_method=Path(folder, "rendezvous").as_uri(),
            rank=rank,
            world_size=num_replicas,
        )
        with listening_for_parent(folder):
            result = _run_in_group(fn, args, device, "a process")
            exit_results.write_result(folder, rank, exit_results.dump(result))
            _wait_for_peers(rank, timeout)
    except BaseException as error:  # a replica that exits has failed its peers too
        exit_results.write_failure(folder, rank, error)
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
    """Returns when all replicas have ended: until then a peer may still sum."""
    try:
        torch.distributed.barrier()
    except RuntimeError as error:
        raise ReplicaError(
            f"replica {rank} returned, but a peer failed or did not return within "
            f"{timeout:g} s: {error}",
            rank,
        ) from error


def _run_here(job: Job, device: str) -> Any:
    """Runs the job's function in this process, which joins its group if it has not."""
    joins = process_group() is None
    world_size = (
        int(os.environ["WORLD_SIZE"]) if joins else torch.distributed.get_world_size()
    )
    if job.num_replicas not in (None, world_size):
        raise ValueError(
            f"num_replicas={job.num_replicas}, but this job has {world_size} "
            "processes: leave num_replicas out or start as many (torchrun "
            "--nproc_per_node)"
        )
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if joins:
        _join_group(device, job.timeout)
    try:
        with listening():
            result = _run_in_group(job.fn, job.args, device, "a process of this job")
            if joins:
                _wait_for_peers(torch.distributed.get_rank(), job.timeout)
        return exit_results.values([result])[0]
    finally:
        if joins:
            torch.distributed.destroy_process_group()


def _run_in_group(
    fn: Callable[..., Any], args: tuple[Any, ...], device: str, reason: str
) -> Any:
    index = torch.cuda.current_device() if device == "cuda" else None
    replica = DistributedReplica(reason, torch.device(device, index))
    with bound(replica):
        return exit_results.run_to_end(fn, replica.rank, args)


# --- the rows -----------------------------------------------------------------------


def _find(is_own: Callable[[str], bool]) -> str | None:
    group = process_group()
    if group is None or not is_own(group):
        return None
    return f"torch.distributed is initialised with {group}"


def _gpu_preference(job: Job) -> int:
    group = process_group()
    return 3 if (torch.cuda.is_available() if group is None else group == "nccl") else 0


register_backend(
    "cuda",
    functools.partial(_find, lambda group: group == "nccl"),
    DistributedReplica,
    functools.partial(_launch, "cuda"),
    preference=_gpu_preference,
    has_any_number=lambda: False,
)
register_backend(
    "cpu",  # and every other group, such as TorchTPU's
    functools.partial(_find, lambda group: group not in ("nccl", "xla")),
    DistributedReplica,
    functools.partial(_launch, "cpu"),
    preference=lambda job: 1,
)
