"""Which replicas of this host wait for others, and for how long.

What a TPU's process waits for is native, has no end, and cannot be interrupted. So it
says in shared memory that it waits, and the process that has started it looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray, RawValue

from xla_replica.backends.replica import Replica
from xla_replica.errors import ReplicaError
from xla_replica.starting import child_process, exit_results

logger = logging.getLogger(__name__)


class HostProgress:
    """What is known of the processes of one host, one for each of its chips."""

    def __init__(self, num_processes: int, timeout: float) -> None:
        self._timeout = timeout
        self._num_replicas = RawValue(ctypes.c_int, 0)
        self._ranks = RawArray(ctypes.c_int, [-1] * num_processes)
        # By time.monotonic, which processes share; 0 while it does not wait.
        self._since = RawArray(ctypes.c_double, num_processes)
        self._returned: list[int] = []
        self._last_return = 0.0
        self._is_logged = False

    def started(self, index: int, replica: Replica) -> None:
        """Keeps which replica process ``index`` is; called in that process."""
        self._num_replicas.value = replica.num_replicas
        self._ranks[index] = replica.rank

    @contextlib.contextmanager
    def waiting(self, index: int) -> Iterator[None]:
        """Surrounds what waits for other replicas, in process ``index``."""
        self._since[index] = time.monotonic()
        try:
            yield
        finally:
            self._since[index] = 0.0

    def watch(
        self, processes: Sequence[BaseProcess], folder: str
    ) -> ReplicaError | None:
        """Waits until all have ended well, or returns who has not, or is late."""
        self._folder = folder
        death = child_process.first_death(self._name, processes, self._late)
        if death is not None and death.rank is not None:  # now a process's number
            death.rank = self._rank(death.rank)
        return death

    def _rank(self, index: int) -> int | None:
        rank = self._ranks[index]
        return None if rank < 0 else rank

    def _name(self, index: int) -> str:
        rank = self._rank(index)
        known = f"the process of chip {index}" if rank is None else f"replica {rank}"
        return f"{known} on host {socket.gethostname()}"

    def _late(self) -> ReplicaError | None:
        """Returns the error that names the replicas that are late, if there are any."""
        if not self._is_logged and -1 not in self._ranks:
            self._log_where()
        now = time.monotonic()
        if (returned := exit_results.returned(self._folder)) != self._returned:
            self._returned, self._last_return = returned, now
        waits = {n: now - since for n, since in enumerate(self._since) if since}
        late = [n for n in range(len(self._ranks)) if n not in waits]
        first = max(waits, key=waits.__getitem__, default=0)
        if waits.get(first, 0.0) > self._timeout:
            goal = f"come to what {self._name(first)} has waited for"
        elif returned and now - self._last_return > self._timeout:
            late = [n for n in late if self._rank(n) not in returned]
            goal = "return after its peers"
            if not late:  # others wait for less than that, or only exit handlers run
                return None
        else:
            return None
        if not late:
            return ReplicaError(
                f"all replicas on host {socket.gethostname()} have waited for "
                f"{self._timeout:g} s: they run different programs, or wait for a "
                "replica of another host, which may have printed what is wrong"
            )
        return ReplicaError(
            f"{' and '.join(map(self._name, late))} did not {goal} within "
            f"{self._timeout:g} s. If a replica is only slow, raise launch(timeout=)",
            late[0],
        )

    def _log_where(self) -> None:
        """Logs which replicas are here: they need not be in the order of hosts."""
        self._is_logged = True
        logger.info(
            "host %s has replicas %s of %d; replica 0, which logs and saves, is %s",
            socket.gethostname(),
            ", ".join(map(str, sorted(self._ranks))),
            self._num_replicas.value,
            "here" if 0 in self._ranks else "on another host",
        )
