"""The child process in which emulated replicas are threads, and how it ends.

The number of XLA:CPU devices is fixed when the runtime starts, and a broken collective
ends the process, so every run has a new one. What each replica was last doing is kept
in shared memory, where it outlives an abort.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.sharedctypes import RawArray

import torch

from xla_replica.backends.xla import XlaReplica
from xla_replica.emulated.emulator import Emulator, environment
from xla_replica.errors import ReplicaError
from xla_replica.starting.child_process import Runtime

_STATUS_BYTES = 400


class EmulatedRuntime(Runtime):
    """One child, in which each replica is a thread.

    The child calls ``prepare_script`` before it imports the user's modules.
    """

    causes: Mapping[int, str] = {
        -signal.SIGABRT: "XLA aborts when replicas that run different programs have "
        "waited 15 s for each other in a collective"
    }

    def __init__(
        self,
        num_replicas: int,
        timeout: float,
        prepare_script: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(num_replicas, timeout)
        self.num_processes = 1
        self.variables = environment(num_replicas)
        self._prepare_script = prepare_script
        self._doing = [
            RawArray(ctypes.c_char, _STATUS_BYTES) for _ in range(num_replicas)
        ]

    def death(self, number: int, how: str) -> ReplicaError:
        seen = "; ".join(
            f"replica {rank}: {text.value.decode(errors='replace') or 'not started'}"
            for rank, text in enumerate(self._doing)
        )
        return ReplicaError(
            f"the process of the emulated replicas {how}. Last seen: {seen}"
        )

    def prepare(self, number: int) -> None:
        torch.set_num_threads(1)
        # Before the user's module is imported: it may take names from torch_xla.
        self._emulator = Emulator(self.num_replicas, self.timeout, self._report)
        if self._prepare_script is not None:
            self._prepare_script()

    def run(self, number: int, run: Callable[[], None]) -> None:
        from torch_xla._internal import pjrt

        pjrt._run_thread_per_device(0, 1, run, pjrt.initialize_multiprocess)

    @contextlib.contextmanager
    def replica(self, number: int, folder: str) -> Iterator[XlaReplica]:
        with self._emulator.replica() as rank:
            self._report(rank, "computing")
            yield XlaReplica(f"emulated on the CPU, {self.num_replicas} threads")

    def _report(self, rank: int, text: str) -> None:
        """Keeps what replica ``rank`` is doing now."""
        self._doing[rank].value = text.encode()[: _STATUS_BYTES - 1]
