"""A script that receives real signals, started in every way there is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from support.scripts import descendants, words, written
from support.xla_replica import tpu_like
from support.xla_replica.torchrun import LAUNCHER

SCRIPT = """
import logging, os, sys, time
from pathlib import Path
import torch, xla_replica

def train(rank, folder, arms, workers, fate):
    replica = xla_replica.current()
    ready = Path(folder, f"ready-{rank}")
    if arms:
        xla_replica.catch_signals(["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
    if fate:
        ready.touch()
        while len(list(Path(folder).glob("ready-*"))) < 2:
            time.sleep(0.05)
        exec(fate)
    updates = range(100_000)
    if workers:
        options = {"num_workers": 2, "multiprocessing_context": workers}
        updates = torch.utils.data.DataLoader(updates, None, **options)
    for update in updates:
        request = xla_replica.stop_requested()
        flags = [torch.zeros(1, device=replica.device) + replica.scalar(bool(request))]
        replica.sync()
        replica.all_reduce_(flags)
        [total] = replica.fetch(flags)
        if total.item():
            Path(folder, f"saved-{rank}").write_text(f"{update} {request}")
            raise xla_replica.Stopped("a test has stopped it", 143)
        if update == 2:
            ready.touch()
        time.sleep(0.01)

if __name__ == "__main__":
    *args, device, num_replicas, timeout = sys.argv[1:]
    if args[-1]:
        logging.basicConfig(level=logging.INFO)
    number = int(num_replicas) or None
    xla_replica.launch(train, (*args,), number, device, timeout=float(timeout))
"""


class Starter(NamedTuple):
    """How a script is started; ``num_replicas`` 0 leaves the number to the starter."""

    command: tuple[str, ...]
    device: str
    num_replicas: int
    num_chips: int = 0

    def start(
        self,
        folder: Path,
        arms: bool = True,
        workers: str = "",
        fate: str = "",
        timeout: float = 60.0,
        waits: bool = True,
        **where: int,
    ) -> Run:
        """Starts the script and, if it ``waits``, returns when all replicas train.

        If it ``arms``, they catch signals. ``workers`` says how each starts two of a
        loader, ``fate`` what both run once they have met, in place of training, and
        ``where`` which host of a slice with TPU chips this is.
        """
        how = folder, "arms" if arms else "", workers, fate, self.device
        arguments = words([*how, self.num_replicas, timeout])
        chips = self.num_chips
        process = subprocess.Popen(
            [*self.command, written(folder, SCRIPT), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=tpu_like.environment(chips, folder, **where) if chips else None,
            start_new_session=True,  # a separate group, to be signalled as a whole
        )
        run = Run(process, folder, self.num_replicas or 2)
        if waits:
            run.wait_until_ready()
        return run


class Run(NamedTuple):
    process: subprocess.Popen[str]
    folder: Path
    num_replicas: int

    def files(self, kind: str) -> list[Path]:
        return sorted(self.folder.glob(f"{kind}-*"))

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while len(self.files("ready")) < self.num_replicas:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(self.process.communicate()[1])
            time.sleep(0.05)

    def signal_all(self, number: signal.Signals) -> None:
        """Signals them one by one, as a machine does that shuts down."""
        for process in [*reversed(self.children()), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):  # it has ended with others
                os.kill(process, number)
            time.sleep(0.05)

    def ends(self) -> tuple[int, str]:
        """Waits for the end; returns the exit status and what was written to stderr."""
        try:
            # torchrun gives its processes 30 s, and a busy machine takes its time.
            error = self.process.communicate(timeout=180)[1]
        finally:
            self.process.kill()
        return self.process.returncode, error

    def children(self) -> list[int]:
        return descendants(self.process.pid)


def processes() -> dict[int, list[str]]:
    """Returns state, parent, group, session and more of processes, without zombies."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            stat = path.read_text().rsplit(")", 1)[1].split()
            if stat[0] != "Z":
                found[int(path.parent.name)] = stat
    return found


def all_end(expected: list[int]) -> None:
    deadline = time.monotonic() + 60
    while alive := processes().keys() & expected:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


PYTHON = (sys.executable,)
LOCAL = Starter(PYTHON, "cpu", 1)
GLOO = Starter(PYTHON, "cpu", 2)
EMULATED = Starter(PYTHON, "xla", 2)
TORCHRUN = Starter(LAUNCHER, "cpu", 0)
AS_A_TPU = Starter(PYTHON, "xla", 0, num_chips=2)
ONE_OF_TWO_HOSTS = Starter(PYTHON, "xla", 0, num_chips=1)
