"""Starts replicas: on the chips of a TPU, on GPUs, or N of them on one CPU."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from xla_replica.current import bound
from xla_replica.environment import variables_set
from xla_replica.errors import ReplicaError
from xla_replica.loader import to_device
from xla_replica.replica import LocalReplica

logger = logging.getLogger(__name__)

DEVICES = ("xla", "cuda", "cpu")


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_replicas: int | None = None,
    device: str | None = None,
    *,
    timeout: float = 120.0,
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on every replica and returns their results by rank.

    Inside ``fn``, `current` is the replica. Where it runs:

    ======== ==================================================================
    device   replicas
    ======== ==================================================================
    'xla'    every chip of the TPU through torch_xla; without a TPU,
             ``num_replicas`` XLA replicas with real collectives on this CPU
    'cuda'   a process per GPU, joined by nccl
    'cpu'    processes on this CPU, joined by gloo
    None     TPU, else GPUs, else one replica in this process; or, if more are
             asked for, 'xla' where torch_xla is installed, else 'cpu'
    ======== ==================================================================

    Under torchrun this process already is one replica: the group is joined and ``fn``
    called here, and the list holds this replica's result alone.

    Args:
        fn: A function defined at the top level of a module.
        args: Arguments after the rank; picklable, as is the result.
        num_replicas: Default: every chip or GPU there is, one on a CPU.
        device: One of the table; default None.
        timeout: Seconds that a replica may be late at a collective before the run is
            ended with an error. On emulated replicas an exception ends it at once.

    Raises:
        ReplicaError: A replica raised (its exception is ``__cause__``), hung, left
            early or differed from its peers. A single replica in this process raises
            its own exception unchanged.
        ValueError: ``num_replicas`` or ``device`` does not exist here.
        TypeError: ``fn`` or ``args`` cannot be sent to another process.
    """
    if device is not None and device not in DEVICES:
        raise ValueError(f"device={device!r} is unknown; allowed are {DEVICES} or None")
    if num_replicas is not None and (
        isinstance(num_replicas, bool)
        or not isinstance(num_replicas, int)
        or num_replicas < 1
    ):
        raise ValueError(f"num_replicas must be an integer >= 1, got {num_replicas!r}")
    if timeout <= 0:
        raise ValueError(f"timeout must be positive seconds, got {timeout!r}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return [_run_under_torchrun(fn, args, num_replicas, device, timeout)]
    device = device or _default_device(num_replicas)
    logger.info("launching %s replicas on %s", num_replicas or "all", device)
    if device == "xla":
        if not _torch_xla_is_installed():
            raise ValueError(
                "device='xla' needs torch_xla: pip install 'elastic-xla[xla]', or "
                "launch with device='cpu'"
            )
        if _has_tpu():
            return _run_on_tpu(fn, args, num_replicas)
        from xla_replica.emulated_process import run_emulated

        return run_emulated(fn, args, num_replicas or 1, timeout)
    if device == "cuda":
        available = torch.cuda.device_count()
        if not 1 <= (num_replicas or available) <= available:
            raise ValueError(
                f"num_replicas={num_replicas} on device='cuda', but there are "
                f"{available} GPUs"
            )
        num_replicas = num_replicas or available
    if (num_replicas or 1) == 1:
        replica = LocalReplica(device, reason="launched alone")
        with bound(replica):
            return [fn(0, *args)]
    return _run_processes(fn, args, num_replicas or 1, device, timeout)


def default_num_replicas(device: str | None = None, on_cpu: int = 1) -> int | None:
    """A script's default for ``launch(num_replicas=)``.

    Returns:
        None, which means all there are, under torchrun, on a TPU and on GPUs; on a CPU,
        where any number can be had, ``on_cpu``.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    device = device or _default_device(on_cpu)
    if device == "cuda" or (device == "xla" and _has_tpu()):
        return None
    return on_cpu


def _default_device(num_replicas: int | None) -> str:
    if _torch_xla_is_installed() and _has_tpu():
        return "xla"
    if torch.cuda.is_available():
        return "cuda"
    if num_replicas in (None, 1):
        return "cpu"
    return "xla" if _torch_xla_is_installed() else "cpu"


def _torch_xla_is_installed() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def _has_tpu() -> bool:
    chosen = os.environ.get("PJRT_DEVICE")
    if chosen is not None:
        return chosen == "TPU"
    # Importing torch_xla would otherwise choose a device for this whole process.
    with variables_set({"PJRT_SELECT_DEFAULT_DEVICE": "0"}):
        from torch_xla._internal import tpu
    return tpu.num_available_chips() > 0


# --- torch_xla on a TPU -------------------------------------------------------------


def _run_on_tpu(
    fn: Callable[..., Any], args: tuple[Any, ...], num_replicas: int | None
) -> list[Any]:
    """A process per chip of this host; results travel through files."""
    import torch_xla

    os.environ.setdefault("PJRT_DEVICE", "TPU")
    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        torch_xla.launch(_tpu_replica, args=(fn, args, num_replicas, folder))
        return _read_results(folder)


def _tpu_replica(
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int | None,
    folder: str,
) -> None:
    from xla_replica.xla import XlaReplica

    replica = XlaReplica("launched by torch_xla")
    if num_replicas not in (None, replica.num_replicas):
        raise ValueError(
            f"num_replicas={num_replicas}, but this TPU has {replica.num_replicas} "
            "devices and torch_xla uses all of them: leave num_replicas out"
        )
    with bound(replica):
        result = fn(rank, *args)
    replica.wait()
    _write_result(folder, rank, result)


# --- torch.distributed: processes of our own, or torchrun's -------------------------


def _run_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int,
    device: str,
    timeout: float,
) -> list[Any]:
    """``num_replicas`` processes on this host that meet through a file."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        try:
            mp.spawn(
                _process_replica,
                args=(fn, args, num_replicas, device, timeout, folder),
                nprocs=num_replicas,
            )
        except mp.ProcessRaisedException as error:
            rank, cause = error.error_index, _read_failure(folder, error.error_index)
            raise ReplicaError(
                f"replica {rank} raised {type(cause).__name__ if cause else 'an error'}"
                f": {cause}\n\n{error}",
                rank,
            ) from cause
        except mp.ProcessExitedException as error:
            raise ReplicaError(
                f"replica {error.error_index} died: {error}", error.error_index
            ) from error
        return _read_results(folder)


def _process_replica(
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
        "nccl" if device == "cuda" else "gloo",
        init_method=Path(folder, "meeting").as_uri(),
        rank=rank,
        world_size=num_replicas,
        timeout=timedelta(seconds=timeout),
    )
    try:
        result = _run_in_group(fn, args, device, "launched as a process")
        _write_result(folder, rank, result)
        # Nobody tears its end down while a peer still sums.
        dist.barrier()
    except Exception as error:
        _write_failure(folder, rank, error)
        raise
    dist.destroy_process_group()


def _run_under_torchrun(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int | None,
    device: str | None,
    timeout: float,
) -> Any:
    """Joins torchrun's group if nobody has, and runs ``fn`` in this process."""
    import torch.distributed as dist

    if device in (None, "xla") and _torch_xla_is_installed() and _has_tpu():
        return _run_torchrun_on_tpu(fn, args, num_replicas)
    if device == "xla":
        raise ValueError(
            "device='xla' under torchrun needs a TPU: XLA replicas on a CPU live in "
            "one process. Start the script with python, or use device='cpu'"
        )
    world_size = int(os.environ["WORLD_SIZE"])
    if num_replicas not in (None, world_size):
        raise ValueError(
            f"num_replicas={num_replicas}, but torchrun started {world_size} "
            "processes: leave num_replicas out or pass --nproc_per_node accordingly"
        )
    use_cuda = device == "cuda" or (device is None and torch.cuda.is_available())
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    joined_here = not dist.is_initialized()
    if joined_here:
        dist.init_process_group(
            "nccl" if use_cuda else "gloo", timeout=timedelta(seconds=timeout)
        )
    try:
        return _run_in_group(
            fn, args, "cuda" if use_cuda else "cpu", "launched by torchrun"
        )
    finally:
        if joined_here:
            dist.destroy_process_group()


def _run_torchrun_on_tpu(
    fn: Callable[..., Any], args: tuple[Any, ...], num_replicas: int | None
) -> Any:
    import torch_xla  # its launch calls the function in this process under torchrun

    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        torch_xla.launch(_tpu_replica, args=(fn, args, num_replicas, folder))
        return _read_results(folder)[0]


def _run_in_group(
    fn: Callable[..., Any], args: tuple[Any, ...], device: str, reason: str
) -> Any:
    from xla_replica.distributed import DistributedReplica

    if device == "cuda":
        replica = DistributedReplica(
            reason, torch.device("cuda", torch.cuda.current_device())
        )
    else:
        replica = DistributedReplica(reason, torch.device("cpu"))
    with bound(replica):
        return fn(replica.rank, *args)


# --- results and failures in files --------------------------------------------------


def _write_result(folder: str, rank: int, result: Any) -> None:
    torch.save(
        to_device(result, torch.device("cpu")), Path(folder, f"{rank:06d}.result")
    )


def _read_results(folder: str) -> list[Any]:
    # Files this very call had written: any picklable value is meant.
    load = functools.partial(torch.load, weights_only=False)
    return [load(path) for path in sorted(Path(folder).glob("*.result"))]


def _write_failure(folder: str, rank: int, error: Exception) -> None:
    try:
        torch.save(error, Path(folder, f"{rank}.failure"))
    except Exception:  # an exception that cannot be pickled; its text still travels
        logger.debug("the exception of replica %d cannot be pickled", rank)


def _read_failure(folder: str, rank: int) -> Exception | None:
    path = Path(folder, f"{rank}.failure")
    try:
        return torch.load(path, weights_only=False)
    except Exception:  # absent, half-written or not importable here
        return None
