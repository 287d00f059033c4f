"""Workers of loaders block the signals that are caught, and are ended all the same."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader

import xla_replica
from xla_replica import stopping

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX")


class Signals:
    """A dataset whose samples say which signals the worker has blocked.

    The second never comes.
    """

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[int]:
        while index:
            time.sleep(60)
        return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended_with_its_iterator(arms):
    """torch waits five seconds for it."""
    iterator = iter(DataLoader(Signals(), None, num_workers=1))
    next(iterator)
    [worker] = iterator._workers
    subprocess.run(["kill", "-s", "TERM", str(worker.pid)], check=True)
    time.sleep(0.2)
    assert worker.is_alive()
    del iterator
    worker.join(20)
    assert worker.exitcode == -signal.SIGKILL


@pytest.fixture
def arms(monkeypatch) -> Iterator[None]:
    """Signals are caught as by a script, and afterwards no more."""
    monkeypatch.setattr(stopping._process, "armed", frozenset())
    with stopping.listening():
        xla_replica.catch_signals(["SIGUSR1"])
        xla_replica.catch_signals(["SIGTERM"])
        yield


@pytest.mark.parametrize("catches", [True, False])
def test_workers_block_the_signals_that_are_caught(catches, request):
    if catches:
        request.getfixturevalue("arms")
    [blocked] = DataLoader(Signals(), None, sampler=[0], num_workers=1)
    caught = {signal.SIGUSR1, signal.SIGTERM}
    assert {*blocked} & caught == (caught if catches else set())
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
