"""The backend 'xla': the chips of a TPU, or replicas emulated on this CPU.

Every chip has a process; `emulated` starts threads of one process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xla_replica.backends.distributed import kinds_served, process_group
from xla_replica.backends.registry import Job, check_is_alone, register_backend
from xla_replica.backends.xla import XlaReplica
from xla_replica.errors import ReplicaError
from xla_replica.starting import child_process, emulated, exit_results
from xla_replica.starting.lateness import HostProgress
from xla_replica.stopping import listening

PCI_DEVICES = Path("/sys/bus/pci/devices")


def is_installed() -> bool:
    """Returns whether torch_xla can be imported, without importing it."""
    return importlib.util.find_spec("torch_xla") is not None


def has_tpu() -> bool:
    """Returns whether PJRT_DEVICE chooses a TPU, or torch_xla would choose one."""
    chosen = os.environ.get("PJRT_DEVICE")
    if not is_installed() or chosen is not None:
        return chosen == "TPU"
    if not _has_device_of_google():
        return False  # without importing torch_xla, which takes seconds
    # Importing torch_xla would otherwise choose a device for this whole process. What
    # else it sets in the environment stays: libtpu needs it.
    name = "PJRT_SELECT_DEFAULT_DEVICE"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        from torch_xla._internal import tpu
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
    return tpu.num_available_chips() > 0


def _has_device_of_google() -> bool:
    """Returns whether the PCI bus has a device of Google's, as every TPU is."""
    vendors = PCI_DEVICES.glob("*/vendor")
    return any(path.read_text().strip() == "0x1ae0" for path in vendors)


def run_on_tpu(job: Job) -> list[Any]:
    """Runs ``fn(rank, *args)`` on every chip and returns this host's results by rank.

    In processes of ours, one for each chip, as `torch_xla.launch` would start them: it
    waits for its first process whatever happens to the others, and they outlive it.
    """
    import torch_xla
    from torch_xla._internal import pjrt

    os.environ.setdefault("PJRT_DEVICE", "TPU")
    if torch_xla._XLAC._xla_runtime_is_initialized():
        raise ReplicaError(
            "an XLA device was used before launch: make tensors and models in the "
            "function that launch runs"
        )
    number = pjrt.tpu.num_local_processes()
    used = 1 if job.num_replicas == 1 else number
    if used < number and (hosts := pjrt.tpu.num_tpu_workers()) > 1:
        raise ValueError(
            f"num_replicas=1, but this slice has {hosts} hosts: leave num_replicas out"
        )
    progress = HostProgress(used, job.timeout)
    task = exit_results.dump_task(job.fn, job.args)
    return child_process.run_in_children(
        _child_main,
        [(index, number, task, job.num_replicas, progress) for index in range(used)],
        progress.watch,
        used,
        start_method="spawn",
    )


def _child_main(
    folder: str,
    index: int,
    number: int,
    task: bytes,
    num_replicas: int | None,
    progress: HostProgress,
) -> None:
    """Runs the replicas of one of ``number`` chips (several on v2 and v3)."""

    @contextlib.contextmanager
    def on_chip() -> Iterator[XlaReplica]:
        replica = XlaReplica(
            "a process of this host", functools.partial(progress.waiting, index)
        )
        progress.started(index, replica)
        # A chip of v2 and v3 has two devices, which are alone without knowing it.
        num_devices = max(replica.num_replicas, replica.rank + 1)
        if num_replicas not in (None, num_devices):
            raise ValueError(
                f"num_replicas={num_replicas}, but there are {num_devices} devices: "
                "leave num_replicas out to use all, or, on one host, pass 1"
            )
        yield replica

    called = exit_results.import_script(task)
    alone = num_replicas == 1 < number
    emulated.run_threads(folder, called, on_chip, index, number, alone)


def _join_torchrun() -> None:
    """Joins torch_xla's group of the processes that torchrun has started."""
    import torch.distributed
    import torch_xla.distributed.xla_backend  # noqa: F401

    os.environ.setdefault("PJRT_DEVICE", "TPU")
    torch.distributed.init_process_group("xla", init_method="xla://")


def _run_here(job: Job) -> Any:
    """Runs the job's function as the replica that this process or thread is already."""
    replica = XlaReplica("a process of this job")
    if job.num_replicas not in (None, replica.num_replicas):
        raise ValueError(
            f"num_replicas={job.num_replicas}, but the group has {replica.num_replicas}"
        )
    with listening():
        result = exit_results.run_replica(replica, job.fn, job.args)
        replica.wait()
    return exit_results.values([result])[0]


# --- the row ------------------------------------------------------------------------


def _is_joined() -> bool:
    """Returns whether the script has joined torch_xla's process group."""
    return process_group() is not None and "xla" in kinds_served()


def _find() -> str | None:
    """Returns why the calling thread has a torch_xla device, None if it has not."""
    if _is_joined():
        return f"torch.distributed is initialised with {process_group()}"
    chosen = os.environ.get("PJRT_DEVICE")
    if process_group() is None and "torch_xla" in sys.modules and chosen:
        return f"PJRT_DEVICE={chosen}"
    return None


def _launch(job: Job) -> list[Any]:
    """Runs a job on the TPU, in the group that was joined, or emulated on the CPU."""
    if not is_installed():
        raise ValueError(
            "device='xla' needs torch_xla: pip install 'elastic-xla[xla-tpu]' on a TPU "
            "VM, 'elastic-xla[xla-cpu]' elsewhere, or launch with device='cpu'"
        )
    if _is_joined():
        return [_run_here(job)]
    if has_tpu() and process_group() is None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return run_on_tpu(job)
        _join_torchrun()
        return [_run_here(job)]
    if job.is_started:
        raise ValueError(
            "device='xla' in one of several processes needs a TPU: start the script "
            "with python, not torchrun, or use device='cpu'"
        )
    check_is_alone()
    num_replicas = job.num_replicas or 1
    return emulated.run_emulated(job.fn, job.args, num_replicas, job.timeout)


def _preference(job: Job) -> int:
    """Returns how much 'xla' is preferred: most on a TPU, then for several replicas."""
    if _is_joined() or (has_tpu() and process_group() is None):
        return 4 if is_installed() else 2  # PJRT_DEVICE=TPU may be torch_tpu's host's
    several_here = job.num_replicas not in (None, 1) and not job.is_started
    return 2 if several_here and is_installed() else 0


register_backend(
    "xla",
    _find,
    XlaReplica,
    _launch,
    preference=_preference,
    has_any_number=lambda: not has_tpu(),
)
