"""The backend 'xla': the chips of a TPU, or replicas emulated on this CPU.

A chip's replica is a process, and emulated ones are threads of one: the number of
XLA:CPU devices is fixed when the runtime starts, and a broken collective ends the
process, so every run has a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.util
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import torch

from xla_replica.backends.distributed import kinds_served, process_group
from xla_replica.backends.registry import Job, check_is_alone, register_backend
from xla_replica.backends.xla import XlaReplica
from xla_replica.common.arguments import check_choice
from xla_replica.emulated.emulator import Emulator, environment
from xla_replica.errors import ReplicaError
from xla_replica.starting.child_process import Runtime, run_here, run_in_children

logger = logging.getLogger(__name__)

PCI_DEVICES = Path("/sys/bus/pci/devices")
# Google's number on the PCI bus, which other devices of its machines have too, and
# those of the chips that torch_xla 2.9, the last one, knows, which is slow to import.
_GOOGLE = "0x1ae0"
_CHIPS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")


def is_installed() -> bool:
    """Returns whether torch_xla can be imported, without importing it."""
    return importlib.util.find_spec("torch_xla") is not None


def has_tpu() -> bool:
    """Returns whether PJRT_DEVICE chooses a TPU, or torch_xla would choose one."""
    chosen = os.environ.get("PJRT_DEVICE")
    if not is_installed() or chosen is not None:
        return chosen == "TPU"
    return any(
        path.read_text().strip() == _GOOGLE
        and path.with_name("device").read_text().strip() in _CHIPS
        for path in PCI_DEVICES.glob("*/vendor")
    )


# --- the chips of this host ----------------------------------------------------------


def check_no_device_is_used() -> None:
    """Raises ReplicaError if this process, which starts replicas, computes by XLA."""
    import torch_xla

    if torch_xla._XLAC._xla_runtime_is_initialized():
        raise ReplicaError(
            "an XLA device was used before launch: make tensors and models in the "
            "function that launch runs"
        )


def _run_on_tpu(job: Job) -> list[Any]:
    """Runs a job on every chip and returns this host's results by rank.

    In processes of ours, one for each chip, as `torch_xla.launch` would start them: it
    waits for its first process whatever happens to the others, and they outlive it.
    """
    from torch_xla._internal import pjrt

    os.environ.setdefault("PJRT_DEVICE", "TPU")
    check_no_device_is_used()
    num_chips = pjrt.tpu.num_local_processes()
    alone = job.num_replicas == 1 < num_chips
    if alone and (hosts := pjrt.tpu.num_tpu_workers()) > 1:
        raise ValueError(
            f"num_replicas=1, but this slice has {hosts} hosts: leave num_replicas out"
        )
    runtime = TpuRuntime(num_chips, job.num_replicas, job.timeout)
    return run_in_children(runtime, job.fn, job.args)


class TpuRuntime(Runtime):
    """A child for each chip of this host, or one for a replica alone.

    What replicas wait for is native and has no end. So a replica says in shared memory
    that it waits, and the process that has started it looks.

    Attributes:
        num_chips: How many chips the host has.
        asked: How many replicas the job asks for, None for all.
    """

    start_method = "spawn"

    def __init__(self, num_chips: int, asked: int | None, timeout: float) -> None:
        super().__init__(1 if asked == 1 else num_chips, timeout)
        self.num_chips, self.asked = num_chips, asked
        self._ranks = RawArray(ctypes.c_int, [-1] * self.num_processes)
        # By time.monotonic, which processes share: since when a process waits, 0 while
        # it does not, and when it has returned.
        self._since = RawArray(ctypes.c_double, self.num_processes)
        self._returned = RawArray(ctypes.c_double, self.num_processes)
        self._is_logged = False

    def death(self, how: str, *numbers: int) -> ReplicaError:
        names = " and ".join(map(self._name, numbers)) or "another host's replica"
        ranks = [self._ranks[number] for number in numbers if self._ranks[number] >= 0]
        return ReplicaError(f"{names} {how}", ranks[0] if ranks else None)

    def late(self) -> ReplicaError | None:
        if not self._is_logged and -1 not in self._ranks:
            self._is_logged, ranks = True, sorted(self._ranks)
            where = "here" if 0 in ranks else "on another host"
            host = socket.gethostname()
            logger.info("replicas %s are on host %s; 0 is %s", ranks, host, where)
        now, numbers = time.monotonic(), range(self.num_processes)
        late = [number for number in numbers if not self._since[number]]
        since, first = min((self._since[n] or now, n) for n in numbers)
        goal = f"come to what {self._name(first)} has waited for"
        if now - since <= self.timeout:
            late = [number for number in late if not self._returned[number]]
            last_return = max(self._returned)
            if not (late and last_return and now - last_return > self.timeout):
                return None
            goal = "return after its peers"
        return self.death(
            f"did not {goal} within {self.timeout:g} s, or replicas run different "
            "programs. If one is only slow, raise launch(timeout=)",
            *late,
        )

    def _name(self, number: int) -> str:
        rank = self._ranks[number]
        known = f"the process of chip {number}" if rank < 0 else f"replica {rank}"
        return f"{known} on host {socket.gethostname()}"

    def run(self, number: int, run: Callable[[], None]) -> None:
        """Runs the replicas of a chip, of which there are two on v2 and v3."""
        from torch_xla._internal import pjrt

        def start(*place: int) -> None:
            if self.asked == 1 < self.num_chips:
                pjrt.initialize_singleprocess()
            else:
                pjrt.initialize_multiprocess(*place)

        pjrt._run_thread_per_device(number, self.num_chips, run, start)
        self._returned[number] = time.monotonic()

    def replica(self, number: int, folder: str) -> AbstractContextManager[XlaReplica]:
        replica = XlaReplica("a process of this host")
        replica.waiting = lambda: self.waiting(number)
        self._ranks[number] = replica.rank
        # A chip of v2 and v3 has two devices, which are alone without knowing it.
        num_devices = max(replica.num_replicas, replica.rank + 1)
        check_choice("num_replicas", self.asked, [None, num_devices], "1 on one host")
        return contextlib.nullcontext(replica)

    @contextlib.contextmanager
    def waiting(self, number: int) -> Iterator[None]:
        """Surrounds what waits for other replicas."""
        self._since[number] = time.monotonic()
        try:
            yield
        finally:
            self._since[number] = 0.0


# --- emulated replicas --------------------------------------------------------------


class EmulatedRuntime(Runtime):
    """One child, in which each replica is a thread.

    Attributes:
        as_tpu: Whether ``xm.xla_device_hw`` says that the devices are those of a TPU.
    """

    causes: Mapping[int, str] = {
        -signal.SIGABRT: "XLA aborts when replicas that run different programs have "
        "waited 15 s for each other in a collective"
    }

    def __init__(self, num_replicas: int, timeout: float, as_tpu: bool = False) -> None:
        super().__init__(num_replicas, timeout)
        self.num_processes, self.as_tpu = 1, as_tpu
        self.variables = environment(num_replicas)

    def death(self, how: str, *numbers: int) -> ReplicaError:
        return ReplicaError(
            f"the process of the emulated replicas {how}. If nobody has killed it, "
            "standard error says where each of them was"
        )

    def prepare(self, number: int) -> None:
        torch.set_num_threads(1)
        faulthandler.enable()  # XLA aborts without an exception
        # Before the user's module is imported: it may take names from torch_xla.
        self._emulator = Emulator(self.num_replicas, self.timeout)
        if self.as_tpu:
            import torch_xla.core.xla_model as xm

            xm.xla_device_hw = lambda device: "TPU"

    def run(self, number: int, run: Callable[[], None]) -> None:
        from torch_xla._internal import pjrt

        pjrt._run_thread_per_device(0, 1, run, pjrt.initialize_multiprocess)

    @contextlib.contextmanager
    def replica(self, number: int, folder: str) -> Iterator[XlaReplica]:
        with self._emulator.replica():
            yield XlaReplica(f"emulated on the CPU, {self.num_replicas} threads")


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
    if has_tpu() and process_group() is None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return _run_on_tpu(job)
        import torch_xla.distributed.xla_backend  # noqa: F401

        os.environ.setdefault("PJRT_DEVICE", "TPU")
        torch.distributed.init_process_group("xla", init_method="xla://")
    if _is_joined():
        replica = XlaReplica("a process of this job")
        return run_here(job, contextlib.nullcontext(replica))
    if job.is_started:
        raise ValueError(
            "device='xla' in one of several processes needs a TPU: start the script "
            "with python, not torchrun, or use device='cpu'"
        )
    check_is_alone()
    runtime = EmulatedRuntime(job.num_replicas or 1, job.timeout)
    return run_in_children(runtime, job.fn, job.args)


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
