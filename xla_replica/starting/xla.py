"""The backend 'xla': the chips of a TPU, or replicas emulated on this CPU.

torch_xla starts a process for every chip; `emulated` starts threads of one process.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from xla_replica.backends.distributed import kinds_served, process_group
from xla_replica.backends.registry import Job, check_is_alone, register_backend
from xla_replica.backends.xla import XlaReplica
from xla_replica.starting import emulated, exit_results
from xla_replica.stopping import Listener, forwarding, listening

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
    # Importing torch_xla would otherwise choose a device for this whole process.
    with mock.patch.dict(os.environ, {"PJRT_SELECT_DEFAULT_DEVICE": "0"}):
        from torch_xla._internal import tpu
    return tpu.num_available_chips() > 0


def _has_device_of_google() -> bool:
    """Returns whether the PCI bus has a device of Google's, as every TPU is."""
    vendors = PCI_DEVICES.glob("*/vendor")
    return any(path.read_text().strip() == "0x1ae0" for path in vendors)


def run_on_tpu(
    fn: Callable[..., Any], args: tuple[Any, ...], num_replicas: int | None
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on every chip and returns this host's results by rank.

    Under torchrun this process is one replica, and torch_xla calls ``fn`` in it.
    """
    import torch_xla

    os.environ.setdefault("PJRT_DEVICE", "TPU")
    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        task = (fn, args, num_replicas, folder, Listener(folder))
        here = "TORCHELASTIC_RUN_ID" in os.environ
        with listening() if here else forwarding(folder):
            torch_xla.launch(_run_replica, args=task)
        return exit_results.values(exit_results.read_results(folder))


def _run_replica(
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int | None,
    folder: str,
    signals: Listener,
) -> None:
    """Runs the replica of one chip, and writes its result; torch_xla calls it."""
    replica = XlaReplica("launched by torch_xla")
    if num_replicas not in (None, replica.num_replicas):
        raise ValueError(
            f"num_replicas={num_replicas}, but there are {replica.num_replicas} "
            "devices and torch_xla uses all of them: leave num_replicas out"
        )
    # Under torchrun the rank that torch_xla passes is one within the host.
    del rank, signals
    result = exit_results.run_replica(replica, fn, args)
    replica.wait()
    exit_results.write_result(folder, replica.rank, result)


def _run_here(job: Job) -> Any:
    """Runs the job's function as the replica that this process or thread is already."""
    replica = XlaReplica("a process of this job")
    if job.num_replicas not in (None, replica.num_replicas):
        raise ValueError(
            f"num_replicas={job.num_replicas}, but the process group that this process "
            f"has joined has {replica.num_replicas}: leave num_replicas out"
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
        return run_on_tpu(job.fn, job.args, job.num_replicas)
    if job.is_started:
        raise ValueError(
            "device='xla' in one of several processes needs a TPU: XLA replicas on a "
            "CPU live in one process. Start the script with python, or use "
            "device='cpu'"
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
