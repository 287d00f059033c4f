"""Replicas that are processes joined by torch.distributed: our own, or torchrun's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from xla_replica.current import bound
from xla_replica.errors import ReplicaError
from xla_replica.outcome import (
    dump_failure,
    dump_task,
    load,
    raise_failure,
    read_results,
    write_result,
)

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


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
    """
    import torch.multiprocessing as mp

    task = dump_task(fn, args)
    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        context = mp.spawn(
            _run_replica,
            args=(task, num_replicas, device, timeout, folder),
            nprocs=num_replicas,
            join=False,
        )
        try:
            while not context.join():
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise_failure(_first_failure(folder, error))
        finally:  # also on Ctrl-C, which may reach this process alone
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        results = read_results(folder)
        if len(results) < num_replicas:  # some called sys.exit(0)
            raise_failure(_first_failure(folder, None))
        return results


def _first_failure(folder: str, error: Any) -> bytes:
    """What the first replica to fail wrote, or that it died without a word."""
    failures = sorted(
        Path(folder).glob("*.failure"), key=lambda p: p.stat().st_mtime_ns
    )
    if failures:
        return failures[0].read_bytes()
    rank = None if error is None else error.error_index
    return dump_failure(rank, ReplicaError(f"replica {rank} died: {error}", rank))


def _run_replica(
    rank: int, task: bytes, num_replicas: int, device: str, timeout: float, folder: str
) -> None:
    import torch.distributed as dist

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
        write_result(folder, rank, _run_in_group(fn, args, device, "a process"))
        _wait_for_peers(rank, timeout)
    except BaseException as error:  # a replica that exits has failed its peers too
        path = Path(folder, f"{rank:06d}")
        path.write_bytes(dump_failure(rank, error))
        path.rename(path.with_suffix(".failure"))  # never read half-written
        raise
    dist.destroy_process_group()


def _join_group(device: str, timeout: float, **where: Any) -> None:
    """Initialises the default group such that destroying it ends its threads.

    torch.distributed.nn has the default group as default arguments. If it is first
    imported while a group exists (the first torch.optim.Optimizer does, by way of
    torch._dynamo), the group outlives destroy_process_group; a gloo thread that frees
    its last tensor while Python exits then aborts the process, after all its work.
    """
    import torch.distributed as dist
    import torch.distributed.nn  # noqa: F401  before there is a group to hold on to

    dist.init_process_group(
        BACKENDS[device], timeout=timedelta(seconds=timeout), **where
    )


def _wait_for_peers(rank: int, timeout: float) -> None:
    """Nobody tears its end down while a peer still sums."""
    import torch.distributed as dist

    try:
        dist.barrier()
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
    """
    import torch.distributed as dist

    joined_here = not dist.is_initialized()
    world_size = int(os.environ["WORLD_SIZE"]) if joined_here else dist.get_world_size()
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
        result = _run_in_group(fn, args, device, "a process of this job")
        if joined_here:
            _wait_for_peers(dist.get_rank(), timeout)
        return result
    finally:
        if joined_here:
            dist.destroy_process_group()


def _run_in_group(
    fn: Callable[..., Any], args: tuple[Any, ...], device: str, reason: str
) -> Any:
    from xla_replica.distributed import DistributedReplica

    index = torch.cuda.current_device() if device == "cuda" else None
    replica = DistributedReplica(reason, torch.device(device, index))
    with bound(replica):
        return fn(replica.rank, *args)
