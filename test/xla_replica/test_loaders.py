"""Device loaders, and workers: they block caught signals, and end all the same."""

import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from support.xla_replica.replicas import SEVERAL_REPLICAS, TPU_LIKE
from torch.utils.data import DataLoader

import xla_replica
from xla_replica import DeviceLoader, LocalReplica, stopping
from xla_replica.device.loader import _warn_once

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX")


class Signals:
    """Samples say which signals are blocked in the worker; the second never comes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[int]:
        while index:
            time.sleep(60)
        return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))


ORPHAN = """
import os, signal, time
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker
from xla_replica.loader_workers import watch_parents

watch_parents()
worker.MP_STATUS_CHECK_INTERVAL = 0.2
member = os.getpid()

def wait_for_its_death():
    while os.getppid() == member:
        time.sleep(0.01)

os.register_at_fork(
    after_in_child=wait_for_its_death,
    after_in_parent=lambda: os.kill(member, signal.SIGKILL),
)
iter(DataLoader(range(8), num_workers=1, multiprocessing_context="fork"))
"""


def test_a_worker_ends_though_its_parent_dies_amid_the_fork():
    options = {"stdout": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", ORPHAN], **options)
    try:
        assert process.communicate(timeout=60) == (b"", None)  # nobody has it any more
        assert process.returncode == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


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
def arms(monkeypatch):
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


def loads(rank: int) -> tuple[str, list[int]]:
    """Forked workers need nothing that can be pickled."""
    method = multiprocessing.get_start_method()
    loader = DataLoader([1, 2], collate_fn=lambda batch: batch[0], num_workers=1)
    return method, [*loader] if method == "fork" else []


@pytest.mark.skipif(sys.platform != "linux", reason="processes are spawned elsewhere")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("backend", [*SEVERAL_REPLICAS, TPU_LIKE])
def test_workers_start_in_replicas_as_in_the_script(backend, method):
    """On a TPU, whose processes are spawned, they are spawned."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        found = backend.run(loads)
    finally:
        multiprocessing.set_start_method(before, force=True)
    expected = "spawn" if backend.device == "tpu-like" else method
    has = expected, [1, 2] if expected == "fork" else []
    assert found == [has] * backend.num_replicas


def test_workers_that_import_the_script_at_every_epoch_are_warned_of_once(caplog):
    """They are what a TPU's process starts."""
    replica = LocalReplica("cpu")
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    _warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "xla_replica"):
        replica.loader(DataLoader([1], **options, persistent_workers=True))
        replica.loader(DataLoader([1], num_workers=1, multiprocessing_context="fork"))
        assert caplog.messages == []
        for _ in range(2):
            replica.loader(DataLoader([1], **options))
    [message] = caplog.messages
    assert "pass persistent_workers=True" in message


def lose() -> None:
    raise ConnectionResetError("reset by a worker that is gone")


class Lost:
    """A dataset on a server that is away; or a batch that is lost on its way."""

    def __getitem__(self, index: int) -> None:
        lose()

    def __reduce__(self):
        return lose, ()


def test_a_worker_that_died_is_the_error_where_no_handler_can_say_so():
    """A TPU's replicas are threads, in which torch has no handler."""

    def reads(rank: int, dataset, collate) -> None:
        loader = DataLoader(dataset, 1, sampler=[0], collate_fn=collate, num_workers=1)
        list(xla_replica.current().loader(loader))

    with pytest.raises(RuntimeError, match="a worker of a DataLoader has died"):
        xla_replica.launch(reads, ([0], lambda batch: Lost()), device="cpu")
    with pytest.raises(ConnectionResetError):
        xla_replica.launch(reads, (Lost(), list), device="cpu")


# --- the device loader ----------------------------------------------------------------

send = LocalReplica("meta").send  # in place of an accelerator


def test_breaking_out_stops_the_thread_after_the_same_number_of_batches():
    """GraB tells passes apart by how many samples each has drawn."""
    before, left = threading.active_count(), threading.Event()

    def batches():
        for number in numbers:
            if number:  # in the thread, which has more to load when the loop is left
                left.wait()
            yield torch.ones(1)

    numbers, timer = itertools.count(), threading.Timer(0.1, left.set)
    for _ in DeviceLoader(batches(), send, prefetch=3):
        timer.start()
        break
    timer.join()
    assert threading.active_count() == before
    assert next(numbers) == 4


def test_an_epoch_begins_in_the_thread_of_the_training_loop():
    """A sampler may compute its order on the device at the first batch."""
    threads = []

    def batches():
        for _ in range(2):
            threads.append(threading.current_thread())
            yield torch.ones(1)

    assert len(list(DeviceLoader(batches(), send))) == 2
    assert [thread is threading.current_thread() for thread in threads] == [True, False]
    assert list(DeviceLoader([], send)) == []
    assert len(DeviceLoader([[torch.ones(1), None]] * 3, send)) == 3


def test_what_has_ended_is_not_asked_again():
    """A sampler that deals a step again after the end deals to the next iteration."""
    dealt = iter([torch.ones(1), torch.ones(2), None, torch.ones(4)])
    loader = DeviceLoader(iter(lambda: next(dealt), None), send, 5)
    assert [len(batch) for batch in loader] == [1, 2]
    assert len(next(dealt)) == 4
