"""Which replicas of this host are late, on a device whose waits are native and endless.

A replica says in shared memory that it waits; the process that has started it looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray

from xla_replica.backends.replica import Replica
from xla_replica.errors import ReplicaError
from xla_replica.starting import child_process, exit_results

logger = logging.getLogger(__name__)


class HostProgress:
    """What is known of the processes of one host, by number; each has a replica."""

    def __init__(self, num_processes: int, timeout: float) -> None:
        self._timeout = timeout
        self._ranks = RawArray(ctypes.c_int, [-1] * num_processes)
        # By time.monotonic, which processes share; 0 while it does not wait.
        self._since = RawArray(ctypes.c_double, num_processes)
        self._returned: list[int] = []
        self._last_return = 0.0
        self._is_logged = False

    def started(self, number: int, replica: Replica) -> None:
        """Keeps which replica a process is; called in that process."""
        self._ranks[number] = replica.rank

    @contextlib.contextmanager
    def waiting(self, number: int) -> Iterator[None]:
        """Surrounds what waits for other replicas, in the process that waits."""
        self._since[number] = time.monotonic()
        try:
            yield
        finally:
            self._since[number] = 0.0

    def watch(
        self, processes: Sequence[BaseProcess], folder: str
    ) -> ReplicaError | None:
        """Waits until all have ended well, or returns who has not, or is late."""

        def late() -> ReplicaError | None:
            return self.late(exit_results.returned(folder))

        def has_returned(number: int) -> bool:
            return self._ranks[number] in exit_results.returned(folder)

        death = child_process.first_death(self._name, processes, has_returned, late)
        if death is not None and death.rank is not None:  # now a process's number
            rank = self._ranks[death.rank]
            death.rank = None if rank < 0 else rank
        return death

    def _name(self, number: int) -> str:
        rank = self._ranks[number]
        known = f"the process of chip {number}" if rank < 0 else f"replica {rank}"
        return f"{known} on host {socket.gethostname()}"

    def late(self, returned: list[int]) -> ReplicaError | None:
        """Returns the error that names the replicas that are late, None without any.

        ``returned`` are the replicas that have ended; to be asked about once a second.
        """
        if not self._is_logged and -1 not in self._ranks:
            self._is_logged, ranks = True, sorted(self._ranks)
            where = "here" if 0 in ranks else "on another host"
            host = socket.gethostname()
            logger.info("replicas %s are on host %s; 0 is %s", ranks, host, where)
        now = time.monotonic()
        if returned != self._returned:
            self._returned, self._last_return = returned, now
        since, first = min((s or now, n) for n, s in enumerate(self._since))
        late = [n for n, s in enumerate(self._since) if not s]
        goal = f"come to what {self._name(first)} has waited for"
        if now - since <= self._timeout:
            late = [n for n in late if self._ranks[n] not in returned]
            if not (late and returned and now - self._last_return > self._timeout):
                return None
            goal = "return after its peers"
        names = " and ".join(map(self._name, late)) or "another host's replica"
        return ReplicaError(
            f"{names} did not {goal} within {self._timeout:g} s, or replicas run "
            "different programs. If one is only slow, raise launch(timeout=)",
            late[0] if late else None,
        )
