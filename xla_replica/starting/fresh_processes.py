"""Fresh processes for replicas, forked from one that has torch imported.

Importing torch, with what torch_xla and optimizers import of it, takes three seconds of
a processor's time, in every process of every run. So they are forked from a server
(Python's own, its default on Linux since 3.14) that has never done anything but import:
no device, no group and no lock is inherited. What a process that was spawned would have
from its parent is handed on (`Surroundings`).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

_IMPORTED = [
    "torch",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.nn",
]
# Who signals a process group means the replicas too. The server, in the same group, is
# to outlive them: it says how they ended.
_FOR_REPLICAS = (signal.SIGTERM, signal.SIGHUP)
_FILES = (1, 2)


def context() -> ForkServerContext | SpawnContext:
    """What starts processes; each of them begins with `Surroundings.enter`."""
    if sys.platform != "linux":  # where forking after an import is not always safe
        return mp.get_context("spawn")
    resource_tracker.ensure_running()  # which would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_REPLICAS)
    try:
        forkserver.set_forkserver_preload(_IMPORTED)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return mp.get_context("forkserver")


class Surroundings:
    """Environment and output files of this process, for one that it starts.

    Args:
        variables: Of the environment, for the other process alone.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = {**os.environ, **(variables or {})}
        self._files: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        files = [reduction.DupFd(number) for number in _FILES]
        return {"_variables": self._variables, "_files": files}

    def enter(self) -> None:
        """Makes them this process's, and lets signals through."""
        os.environ.clear()
        os.environ.update(self._variables)
        for number, file in zip(_FILES, self._files):
            received = file.detach()
            os.dup2(received, number)
            os.close(received)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_REPLICAS)
