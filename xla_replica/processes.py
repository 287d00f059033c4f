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
from xla_replica.outcome_files import (
    read_failure,
    read_results,
    write_failure,
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

    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        try:
            mp.spawn(
                _run_replica,
                args=(fn, args, num_replicas, device, timeout, folder),
                nprocs=num_replicas,
            )
        except mp.ProcessRaisedException as error:
            rank = error.error_index
            cause = read_failure(folder, rank)
            if isinstance(cause, ReplicaError):
                raise cause from None
            what = "an exception" if cause is None else type(cause).__name__
            raise ReplicaError(
                f"replica {rank} raised {what}: {cause}\n{error}", rank
            ) from cause
        except mp.ProcessExitedException as error:
            rank = error.error_index
            raise ReplicaError(f"replica {rank} died: {error}", rank) from error
        return read_results(folder)


def _run_replica(
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int,
    device: str,
    timeout: float,
    folder: str,
) -> None:
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_replicas))
    dist.init_process_group(
        BACKENDS[device],
        init_method=Path(folder, "meeting").as_uri(),
        rank=rank,
        world_size=num_replicas,
        timeout=timedelta(seconds=timeout),
    )
    try:
        write_result(folder, rank, _run_in_group(fn, args, device, "a process"))
        dist.barrier()  # nobody tears its end down while a peer still sums
    except Exception as error:
        write_failure(folder, rank, error)
        raise
    dist.destroy_process_group()


def run_under_torchrun(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int | None,
    device: str,
    timeout: float,
) -> Any:
    """Joins torchrun's group if nobody has; runs ``fn(rank, *args)`` right here.

    Raises:
        ValueError: torchrun started another number of processes.
    """
    import torch.distributed as dist

    world_size = int(os.environ["WORLD_SIZE"])
    if num_replicas not in (None, world_size):
        raise ValueError(
            f"num_replicas={num_replicas}, but torchrun started {world_size} "
            "processes: leave num_replicas out or pass --nproc_per_node accordingly"
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    joined_here = not dist.is_initialized()
    if joined_here:
        dist.init_process_group(BACKENDS[device], timeout=timedelta(seconds=timeout))
    try:
        return _run_in_group(fn, args, device, "launched by torchrun")
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
