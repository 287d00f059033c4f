"""Starts replicas: on the chips of a TPU, on GPUs, or N of them on one CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from xla_replica.backends.current_replica import bound
from xla_replica.backends.replica import LocalReplica
from xla_replica.starting import tpu
from xla_replica.stopping import listening

logger = logging.getLogger(__name__)

DEVICES = ("xla", "cuda", "cpu")


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_replicas: int | None = None,
    device: str | None = None,
    *,
    timeout: float = 300.0,
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

    Under torchrun, wherever else ``WORLD_SIZE`` is above 1, and after
    ``init_process_group`` this process already is one replica: its group is joined and
    ``fn`` called here, and the list holds this replica's result alone.

    Args:
        fn: A function defined at the top level of a module.
        args: Arguments after the rank; picklable, as is the result.
        num_replicas: Default: every chip or GPU there is, one on a CPU.
        device: One of the table; default None.
        timeout: Seconds that a replica may be late, at a collective or behind the last
            of its peers to return, before the run is ended with an error. On emulated
            replicas an exception ends it at once.

    Raises:
        Stopped: Replicas did; raised when all have ended.
        ReplicaError: A replica on this CPU or these GPUs raised (its exception is
            ``__cause__``), hung, left early or differed from its peers. A replica in
            this very process raises its own exception unchanged, and torch_xla reports
            those of a TPU in its way.
        ValueError: ``num_replicas`` or ``device`` does not exist here.
        TypeError: ``fn`` or ``args`` cannot be sent to another process.
    """
    _check_arguments(num_replicas, device, timeout)
    if _is_one_of_several_processes():
        return _launch_here(fn, args, num_replicas, device, timeout)
    device = device or _default_device(num_replicas)
    logger.info("launching %s replicas on %s", num_replicas or "all", device)
    if device == "xla":
        if tpu.has_tpu():
            return tpu.run_on_tpu(fn, args, num_replicas)
        from xla_replica.emulated.process import run_emulated

        return run_emulated(fn, args, num_replicas or 1, timeout)
    if num_replicas is None:
        num_replicas = torch.cuda.device_count() if device == "cuda" else 1
    if num_replicas == 1:
        with listening(), bound(LocalReplica(device, reason="launched alone")):
            return [fn(0, *args)]
    from xla_replica.starting.processes import run_processes

    return run_processes(fn, args, num_replicas, device, timeout)


def _launch_here(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int | None,
    device: str | None,
    timeout: float,
) -> list[Any]:
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized()
    if device in (None, "xla") and not joined and tpu.has_tpu():
        return tpu.run_on_tpu(fn, args, num_replicas)
    if device == "xla":
        raise ValueError(
            "device='xla' in one of several processes needs a TPU: XLA replicas on a "
            "CPU live in one process. Start the script with python, or use "
            "device='cpu'"
        )
    from xla_replica.starting.processes import run_in_this_process

    if device is None:
        on_gpu = dist.get_backend() == "nccl" if joined else torch.cuda.is_available()
        device = "cuda" if on_gpu else "cpu"
    return [run_in_this_process(fn, args, num_replicas, device, timeout)]


def _check_arguments(
    num_replicas: int | None, device: str | None, timeout: float
) -> None:
    if device is not None and device not in DEVICES:
        raise ValueError(f"device={device!r} is unknown; allowed are {DEVICES} or None")
    if num_replicas is not None and (
        isinstance(num_replicas, bool)
        or not isinstance(num_replicas, int)
        or num_replicas < 1
    ):
        raise ValueError(f"num_replicas must be an integer >= 1, got {num_replicas!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be positive seconds, got {timeout!r}")
    if device == "xla" and not tpu.is_installed():
        raise ValueError(
            "device='xla' needs torch_xla: pip install 'elastic-xla[xla]', or launch "
            "with device='cpu'"
        )
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and not 1 <= (num_replicas or num_gpus) <= num_gpus:
        raise ValueError(
            f"num_replicas={num_replicas} on device='cuda', but there are {num_gpus} "
            "GPUs"
        )


def default_num_replicas(device: str | None = None, on_cpu: int = 1) -> int | None:
    """A script's default for ``launch(num_replicas=)``.

    Returns:
        None, which means all there are, under torchrun, on a TPU and on GPUs; on a CPU,
        where any number can be had, ``on_cpu``.
    """
    if _is_one_of_several_processes():
        return None
    device = device or _default_device(on_cpu)
    if device == "cuda" or (device == "xla" and tpu.has_tpu()):
        return None
    return on_cpu


def _default_device(num_replicas: int | None) -> str:
    if tpu.has_tpu():
        return "xla"
    if torch.cuda.is_available():
        return "cuda"
    if num_replicas in (None, 1):
        return "cpu"
    return "xla" if tpu.is_installed() else "cpu"


def _is_one_of_several_processes() -> bool:
    """Whether torchrun, another launcher or the user has made this a replica."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return True
    return (
        "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    )
