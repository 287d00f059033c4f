"""Workers of loaders ignore signals that are not their parent's, and end with it."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.xla_replica.stopping import LOCAL, all_end
from torch.utils.data import DataLoader

import xla_replica
from xla_replica import stopping
from xla_replica.loader_workers import spare_workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs sigwaitinfo")


def from_another(process: int, name: str) -> None:
    subprocess.run(["kill", "-s", name, str(process)], check=True)


def hangs(ready: str) -> None:
    xla_replica.leave_signals_to_parent()
    Path(ready).touch()
    while True:
        time.sleep(60)


def test_a_worker_ends_where_its_parent_alone_says_so(tmp_path):
    """As a DataLoader does with one that hangs."""
    ready = tmp_path / "ready"
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=hangs, args=(str(ready),))
    worker.start()
    while not ready.exists():
        assert worker.is_alive()
        time.sleep(0.01)
    for name in ("TERM", "INT", "TERM"):
        from_another(worker.pid, name)
    time.sleep(0.2)
    assert worker.is_alive()
    worker.terminate()
    worker.join(20)
    assert worker.exitcode == 0


class Signals:
    """A dataset whose samples say which signals the worker has blocked."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[int]:
        return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))


def test_workers_spare_the_signals_that_are_caught_while_they_are(monkeypatch):
    def blocked() -> list[int]:
        [first, _] = DataLoader(Signals(), None, num_workers=1)
        return first

    before = blocked()
    monkeypatch.setattr(stopping._process, "armed", frozenset())
    handlers = [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)]
    try:

        def train(rank: int) -> list[int]:
            xla_replica.catch_signals(["SIGUSR1"])
            xla_replica.catch_signals(["SIGTERM"])
            return blocked()

        [within] = xla_replica.launch(train, (), 1, "cpu")
    finally:
        spare_workers(frozenset())
    assert set(within) - set(before) == {signal.SIGUSR1, signal.SIGTERM}
    assert blocked() == before
    assert handlers == [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.slow
def test_no_worker_outlives_a_killed_parent(tmp_path):
    run = LOCAL.start(tmp_path, True, "fork")
    children = run.children()
    assert len(children) >= 2
    run.process.kill()
    run.process.communicate()
    all_end(children)
