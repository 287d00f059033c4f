"""All replicas stop at the same update, asked by a signal or by the program."""

import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from support.scripts import python
from support.xla_replica import replicas, stopping
from support.xla_replica.replicas import SEVERAL_REPLICAS, of_torch_alone, row

import xla_replica
from xla_replica import ReplicaError, Stopped, StopRequest
from xla_replica.stopping import forwarding

STARTERS = {
    "local": (stopping.LOCAL, [of_torch_alone]),
    "gloo": (stopping.GLOO, [of_torch_alone]),
    "torchrun": (stopping.TORCHRUN, [of_torch_alone]),
    "emulated": (stopping.EMULATED, replicas.MARKS["xla"]),
    "tpu-like": (stopping.AS_A_TPU, replicas.TPU_LIKE.marks),
}


def starts(name: str, *values: str, slow: bool = False):
    starter, marks = STARTERS[name]
    marks = [*marks, *([pytest.mark.slow] if slow else [])]
    return pytest.param(starter, *values, id="-".join([name, *values]), marks=marks)


def stops(rank: int, who: tuple[int, ...], early: str = "") -> None:
    """Some replicas stop, in time after a sum of all; others work on their own."""
    replica = xla_replica.current()
    if early and rank in who:
        if early == "returns":
            return
        raise Stopped("too early")
    replica.all_reduce_([torch.ones(1, device=replica.device)])
    replica.wait()
    if rank in who:
        raise Stopped(f"replica {rank} of {replica.num_replicas}", 7)
    time.sleep(0.5)


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_launch_raises_stopped_an_exit_with_a_reason_when_all_have_ended(backend):
    with pytest.raises(SystemExit) as caught:
        backend.run(stops, (1, 2))
    assert type(stopped := caught.value) is Stopped
    assert stopped.reason == str(stopped) == "replica 1 of 3"
    assert stopped.exit_status == stopped.code == 7


@pytest.mark.parametrize("early", ["stops", "returns"])
@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_a_replica_that_ends_alone_is_an_error(backend, early):
    says = "replica 1 returned|peer failed|failed in all_reduce_ of 1"
    with pytest.raises(ReplicaError, match=says):
        backend.run(stops, (1,), early, timeout=4)


# --- requests -----------------------------------------------------------------------


def stops_when_asked(rank: int) -> None:
    if rank == 0:
        assert xla_replica.stop_requested() is None
        xla_replica.request_stop("maintenance", 3)
        xla_replica.request_stop("a second reason", 4)
    replica = xla_replica.current()
    for _ in range(3):
        request = xla_replica.stop_requested()
        asked = torch.zeros(1).to(replica.device) + replica.scalar(request is not None)
        replica.sync()
        replica.all_reduce_([asked])
        if replica.fetch([asked])[0].item():
            reason, status = request or ("a peer was asked", 0)
            raise Stopped(reason, status)


@pytest.mark.parametrize("backend", [row("cpu", 1), *SEVERAL_REPLICAS])
def test_a_program_can_ask(backend):
    """The next run in the same process starts without that request."""
    for _ in range(2 if backend.num_replicas == 1 else 1):
        with pytest.raises(Stopped, match="maintenance") as caught:
            backend.run(stops_when_asked)
        assert caught.value.exit_status == 3
        assert xla_replica.stop_requested() is None


def signals_itself(rank: int) -> None:
    xla_replica.catch_signals(["SIGTERM", signal.SIGINT])
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)  # as if it were a copy of the first
    assert xla_replica.stop_requested() == StopRequest("received SIGINT", 130)
    time.sleep(1.1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def test_a_second_signal_acts_as_if_not_caught():
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(KeyboardInterrupt):
        replicas.Backend("cpu", 1).run(signals_itself)
    assert handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]


INTERRUPTED = """
import os, signal, time
from xla_replica import stopping
stopping.DUPLICATE_SECONDS = 0.01
stopping.catch_signals()
for _ in range(2):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
"""


@of_torch_alone
def test_a_second_interrupt_ends_a_script_without_a_traceback():
    assert python("-c", INTERRUPTED, status=-signal.SIGINT).stderr == ""


OUTSIDE = """
import os, signal, threading, torch, xla_replica

def listens():
    try:
        xla_replica.catch_signals()
    except ValueError as error:
        print(error)

print(xla_replica.current())
thread = threading.Thread(target=listens)
thread.start()
thread.join()
xla_replica.catch_signals(["SIGUSR1", "SIGTERM"])
os.kill(os.getpid(), signal.SIGUSR1)

def train(rank):
    request = xla_replica.stop_requested()  # from before launch
    raise xla_replica.Stopped(request.reason, request.exit_status)

try:
    xla_replica.launch(train, device="cpu")
except xla_replica.Stopped as stopped:
    assert stopped.exit_status == 128 + signal.SIGUSR1, stopped
assert xla_replica.stop_requested() is None
os.kill(os.getpid(), signal.SIGTERM)  # still armed
assert xla_replica.stop_requested().exit_status == 143

loader = torch.utils.data.DataLoader([1, 2, 3], num_workers=1, persistent_workers=True)
assert len(list(loader)) == 3
"""


@of_torch_alone
def test_a_plain_script_is_one_replica_and_can_catch_signals(monkeypatch):
    """At its end Python also ends the worker of a live iterator, by `terminate`."""
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    done = python("-c", OUTSIDE, timeout=60)
    assert done.stderr == ""
    place, thread = done.stdout.splitlines()
    assert "replica 0 of 1" in place
    assert "signal only works in main thread" in thread


# --- real signals to real scripts -----------------------------------------------------


@pytest.mark.parametrize("is_armed", [True, False])
def test_a_signal_that_replicas_obey_or_have_obeyed_goes_no_further(is_armed, tmp_path):
    """Of a signal to a process group, the leader's copy may arrive last."""
    went_on = mock.Mock()
    before = signal.signal(signal.SIGTERM, went_on)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    try:
        with forwarding(str(tmp_path)):
            if is_armed:
                (tmp_path / f"{gone.pid}.{signal.SIGTERM.value}.armed").touch()
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert went_on.call_count == (not is_armed)


@pytest.mark.parametrize(("starter", "name", "workers"), [
    *(starts(name, "SIGTERM", "") for name in STARTERS),
    *(starts(name, "SIGUSR1", "") for name in ("gloo", "tpu-like")),
    starts("emulated", "SIGUSR1", "", slow=True),
    starts("gloo", "SIGHUP", "fork"),
    starts("local", "SIGTERM", "fork"),
    starts("local", "SIGTERM", "spawn", slow=replicas.HAS_XLA),
    starts("local", "SIGTERM", "forkserver", slow=True),
    starts("gloo", "SIGTERM", "fork"),
    starts("gloo", "SIGINT", "spawn", slow=True),
    starts("emulated", "SIGTERM", "fork", slow=True),
    starts("emulated", "SIGINT", "spawn", slow=True),
    starts("tpu-like", "SIGTERM", "fork"),
    starts("tpu-like", "SIGINT", "spawn"),
])  # fmt: skip
def test_a_caught_signal_stops_all_at_one_update(starter, name, workers, tmp_path):
    """One to the script; or, with workers, one to all, as a machine that shuts down."""
    run, number = starter.start(tmp_path, workers=workers), signal.Signals[name]
    children = run.children()
    if workers:
        run.signal_all(number)
    else:
        run.process.send_signal(number)
    status, error = run.ends()
    if starter is not stopping.TORCHRUN:  # whose own status tells of the signal
        # The last of the signals to all may come when the script is about to end.
        assert status in (143, -number if workers else 143), error
    assert "DataLoader worker" not in error  # whose death would end the training
    saved = [path.read_text().split(" ", 1) for path in run.files("saved")]
    assert len(saved) == run.num_replicas, error
    assert len({update for update, _ in saved}) == 1
    assert any(f"received {name}" in request for _, request in saved)
    stopping.all_end(children)


@pytest.mark.parametrize(("starter", "name", "workers"), [
    starts("local", "SIGTERM", ""),
    starts("local", "SIGINT", ""),
    starts("gloo", "SIGTERM", ""),
    starts("gloo", "SIGINT", "", slow=True),
    starts("emulated", "SIGTERM", "", slow=True),
    starts("emulated", "SIGINT", "", slow=True),
    *(starts(name, "SIGKILL", "") for name in ("gloo", "emulated", "tpu-like")),
    starts("local", "SIGKILL", "fork", slow=True),
])  # fmt: skip
def test_nothing_outlives_a_parent_ended_by_a_signal(starter, name, workers, tmp_path):
    """It does not save either: another run may have begun in the same folder."""
    number = signal.Signals[name]
    run = starter.start(tmp_path, arms=name == "SIGKILL", workers=workers)
    children = run.children()
    least = {stopping.LOCAL: 2 if workers else 0, stopping.EMULATED: 1}
    assert len(children) >= least.get(starter, 2)
    run.process.send_signal(number)
    status, error = run.ends()
    assert status == -number
    assert ("KeyboardInterrupt" in error) == (name == "SIGINT")
    stopping.all_end(children)
    assert run.files("saved") == []
