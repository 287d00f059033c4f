"""Processes on this CPU or on accelerators, joined by torch.distributed.

`launch` starts them, or torchrun or another launcher has. The accelerator is the one
that torch names, and the group is torch's for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from xla_replica.backends.distributed import (
    DistributedReplica,
    chosen_by_script,
    computing_on,
    device_in_group,
    kinds_served,
    process_group,
)
from xla_replica.backends.local import LocalReplica, default_device, in_use
from xla_replica.backends.registry import Job, check_is_alone, register_backend
from xla_replica.common.arguments import check_integer
from xla_replica.device.device_traits import traits
from xla_replica.errors import ReplicaError
from xla_replica.starting import torch_tpu
from xla_replica.starting.child_process import Runtime, run_here, run_in_children

# Where launchers say which of its host's processes this is. Slurm's comes last: mpirun
# inherits that of the script that called it.
_LOCAL_RANKS = (
    "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"
)  # fmt: skip
_GLOO_ABORTS = (
    "so gloo ends a process whose peer is at another collective, as one under "
    "`if rank == 0:`: call each on every replica, with tensors of the same sizes"
)
_NCCL_ABORTS = (
    "so nccl ends a process whose peer is later at a collective than launch(timeout=) "
    "allows, or has failed; what it prints on standard error says which collective"
)


def _launch(device: torch.device, job: Job) -> list[Any]:
    """Runs a job on devices of a kind; see `launch`."""
    if job.is_started:
        return _run_here(job, device)
    check_is_alone()
    torch_tpu.check_is_only_host(device)
    most = None if traits(device).is_host else torch.accelerator.device_count()
    num_replicas = job.num_replicas or most or 1
    check_integer(f"num_replicas on {device.type!r}", num_replicas, 1, most)
    if num_replicas == 1:
        alone = LocalReplica(in_use(device), reason="launched alone")
        return run_here(job, contextlib.nullcontext(alone))
    runtime = ProcessGroupRuntime(device, num_replicas, job.timeout)
    return run_in_children(runtime, job.fn, job.args)


class ProcessGroupRuntime(Runtime):
    """A child for each replica, on its own device of a kind."""

    def __init__(self, kind: torch.device, num_replicas: int, timeout: float) -> None:
        super().__init__(num_replicas, timeout)
        self._kind = kind.type  # which importing the script may register
        if kind.type in torch_tpu.BOUND_KINDS:
            self.start_method = "spawn"
            self.variables = torch_tpu.variables_of_run(kind, num_replicas)
        aborts = _GLOO_ABORTS if traits(kind).is_host else _NCCL_ABORTS
        self.causes = {-signal.SIGABRT: aborts}

    def prepare(self, number: int) -> None:
        if self._kind not in torch_tpu.BOUND_KINDS:
            return
        rank, size = str(number), str(self.num_replicas)
        # What a launcher such as torchrun sets, and the runtime reads.
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        # Asked for, but not used: the group meets in a file.
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")

    def replica(self, number: int, folder: str) -> Any:
        device = _take_device(torch.device(self._kind), number)
        where = {"rank": number, "world_size": self.num_replicas}
        file = Path(folder, "rendezvous").as_uri()
        return _joined(device, self.timeout, init_method=file, **where)


def _take_device(kind: torch.device, local_rank: int | None) -> torch.device:
    """Returns this process's device, which new tensors of its kind are then on.

    Args:
        kind: A device without an index.
        local_rank: The process's number on this host; None where nobody knows it, and
            the device is the one that the script uses.
    """
    if traits(kind).is_host or kind.type in torch_tpu.BOUND_KINDS:
        return kind
    if local_rank is None:
        return in_use(kind)
    count = torch.accelerator.device_count()
    # Some launchers show every process its own device alone. Where they do not, and two
    # processes take the only device, nccl says so.
    index = 0 if count == 1 else local_rank
    torch.get_device_module(kind).set_device(index)
    return torch.device(kind.type, index)


@contextlib.contextmanager
def _joined(
    device: torch.device, timeout: float, **where: Any
) -> Iterator[DistributedReplica]:
    """Initialises the default group, and destroys it once all replicas have returned.

    torch.distributed.nn has the default group as default arguments. If it is first
    imported while a group exists (the first torch.optim.Optimizer does, by way of
    torch._dynamo), the group outlives destroy_process_group; a gloo thread that frees
    its last tensor while Python exits then aborts the process, after all its work.
    """
    import torch.distributed.nn  # before there is a group to hold on to

    backend = torch.distributed.get_default_backend_for_device(device)
    # nccl then connects now, on this device, and not at the first sum.
    where["device_id"] = None if device.index is None else device
    patience = timedelta(seconds=timeout)
    torch.distributed.init_process_group(backend, timeout=patience, **where)
    with computing_on(device) as replica:
        yield replica
        try:  # until all have ended a peer may still sum
            # Not a collective with numbers, as in Replica.barrier, which could be
            # taken for a peer's.
            torch.distributed.barrier()
        except RuntimeError as error:
            raise ReplicaError(
                f"replica {replica.rank} returned, but a peer failed or did not return "
                f"within {timeout:g} s: {error}",
                replica.rank,
            ) from error
    torch.distributed.destroy_process_group()


_launches = itertools.count()


def _meeting_place(timeout: float) -> dict[str, Any]:
    """Returns where the processes of a job meet, as `init_process_group` takes it.

    Every launch, and every restart by torchrun, has its own keys in the launcher's
    store. With torch's own, which are always the same, a process may read the address
    that a peer had before, and fail or hang.
    """
    restart = "0"
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # else hosts count their own restarts
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", restart)
    patience = timedelta(seconds=timeout)
    found = torch.distributed.rendezvous("env://", timeout=patience)
    store, rank, world_size = next(found)
    keys = f"restart-{restart}/launch-{next(_launches)}"
    store = torch.distributed.PrefixStore(keys, store)
    return {"store": store, "rank": rank, "world_size": world_size}


def _run_here(job: Job, kind: torch.device) -> list[Any]:
    """Runs the job's function in this process, which joins its group if it has not."""
    torch_tpu.check_variables(kind)
    if process_group() is not None:
        return run_here(job, computing_on(chosen_by_script(kind)))
    ranks = (int(os.environ[name]) for name in _LOCAL_RANKS if name in os.environ)
    device = _take_device(kind, next(ranks, None))
    where = _meeting_place(job.timeout)
    try:
        return run_here(job, _joined(device, job.timeout, **where))
    except BaseException:
        # Peers do not come any more, and nccl's group would wait for them when it is
        # destroyed, while nobody sees the exception.
        if process_group() is not None:
            torch.distributed.distributed_c10d._abort_process_group()
        raise


# --- the rows -----------------------------------------------------------------------


def _find() -> str | None:
    """Finds a group of any backend but torch_xla's, which has its own row."""
    group = process_group()
    if group is None or "xla" in kinds_served():
        return None
    return f"torch.distributed is initialised with {group}"


def _launch_on_cpu(job: Job) -> list[Any]:
    return _launch(torch.device("cpu"), job)


def _launch_on_accelerator(job: Job) -> list[Any]:
    """Runs a job on the accelerator that torch names; see `launch`."""
    device = default_device()
    if traits(device).is_host:
        raise ValueError("device='accelerator', but torch finds none: leave device out")
    return _launch(device, job)


def _accelerator_preference(job: Job) -> int:
    """Returns how much an accelerator is preferred: 0 where there is none."""
    if process_group() is not None and _find() is None:
        return 0
    device = default_device() if process_group() is None else device_in_group()
    return 0 if traits(device).is_host else 3


register_backend(
    "accelerator",
    lambda: None,  # the row below finds every group
    DistributedReplica,
    _launch_on_accelerator,
    preference=_accelerator_preference,
    has_any_number=lambda: False,
)
register_backend(
    "cpu", _find, DistributedReplica, _launch_on_cpu, preference=lambda job: 1
)
