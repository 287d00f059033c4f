"""The processes of one member, which begin and end together."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from xla_replica.stopping import SIGNALS

# The exit statuses of who was asked to stop.
LEFT = (*(128 + n for n in SIGNALS), -signal.SIGTERM, -signal.SIGINT)


class Processes:
    """A command that runs in so many processes of this machine, as torchrun starts it.

    Args:
        command: What each of them runs.
        environment: Theirs, beside RANK, WORLD_SIZE and their like if they are several.
        number: How many.

    Attributes:
        pid: That of the first.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], number: int
    ) -> None:
        own: list[dict[str, str]] = [{}]
        self._store: Any = None  # at which they meet
        if number > 1:
            from torch.distributed import TCPStore

            host = "127.0.0.1"
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            own = [
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(number),
                    "LOCAL_WORLD_SIZE": str(number),
                    "MASTER_ADDR": host,
                    "MASTER_PORT": str(self._store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
                for rank in range(number)
            ]
        self._all = [
            subprocess.Popen(command, env={**environment, **each}) for each in own
        ]
        self.pid = self._all[0].pid
        self._status = 0  # of the first that has not ended well

    def poll(self) -> int | None:
        """Returns the exit status, None while one runs; if one dies, so do all."""
        statuses = [process.poll() for process in self._all]
        if not self._status:
            self._status = next((status for status in statuses if status), 0)
        if None not in statuses:
            return self._status
        if self._status and self._status not in LEFT:
            self.kill()
        return None

    def terminate(self) -> None:
        """Asks them to stop."""
        for process in self._all:
            process.terminate()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until all have ended; raises TimeoutExpired if one takes longer."""
        for process in self._all:
            process.wait(seconds)

    def kill(self) -> None:
        """Kills them."""
        for process in self._all:
            process.kill()
