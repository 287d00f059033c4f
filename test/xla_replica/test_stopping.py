"""All replicas stop at the same update, asked by a signal or by the program."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch
from support.xla_replica.replicas import (
    SEVERAL_REPLICAS,
    Backend,
    needs_xla,
    of_torch_alone,
    row,
)
from support.xla_replica.stopping import (
    AS_A_TPU,
    EMULATED,
    GLOO,
    LOCAL,
    TORCHRUN,
    all_end,
)

import xla_replica
from xla_replica import ReplicaError, Stopped
from xla_replica.stopping import forwarding

XLA = [needs_xla, pytest.mark.xla]
SLOW = pytest.mark.slow
ON_CHIPS = [*XLA, SLOW, pytest.mark.tpu_like]
STARTERS = [
    pytest.param(LOCAL, id="local"),
    pytest.param(GLOO, id="gloo", marks=of_torch_alone),
    pytest.param(TORCHRUN, id="torchrun"),
    pytest.param(EMULATED, id="emulated", marks=XLA),
    pytest.param(AS_A_TPU, id="tpu-like", marks=ON_CHIPS),
]


# --- Stopped ------------------------------------------------------------------------


def test_stopped_is_an_exit_with_a_reason():
    stopped = pickle.loads(pickle.dumps(Stopped("the machine goes away", 7)))
    assert (stopped.reason, stopped.exit_status, stopped.code) == (
        "the machine goes away",
        7,
        7,
    )
    assert str(stopped) == "the machine goes away"
    script = "import xla_replica; raise xla_replica.Stopped('why', 9)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((7,), TypeError, "reason must be a string, got 7"),
        (("why", True), TypeError, "exit_status must be an integer"),
        (("why", 256), ValueError, "exit_status must be .* <= 255, got 256"),
    ],
)
def test_stopped_and_request_stop_reject(arguments, error, text):
    for function in (Stopped, xla_replica.request_stop):
        with pytest.raises(error, match=text):
            function(*arguments)
    assert xla_replica.stop_requested() is None


def stops(rank: int, who: tuple[int, ...]) -> int:
    """Some replicas stop after a sum of all; the others still work on their own."""
    replica = xla_replica.current()
    ones = [torch.ones(1, device=replica.device)]
    replica.all_reduce_(ones)
    replica.sync()
    if rank in who:
        raise Stopped(f"replica {rank} of {replica.num_replicas}", 7)
    time.sleep(0.5)
    return rank


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_launch_raises_stopped_when_all_have_ended(backend):
    with pytest.raises(Stopped, match="replica 1 of 3") as caught:
        backend.run(stops, (1, 2))
    assert caught.value.exit_status == 7


def stops_early(rank: int) -> None:
    replica = xla_replica.current()
    if rank == 1:
        raise Stopped("too early")
    replica.all_reduce_([torch.ones(1, device=replica.device)])
    replica.wait()


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_a_replica_that_stops_alone_is_an_error(backend):
    with pytest.raises(
        ReplicaError, match=r"replica 1 returned|peer failed|failed in all_reduce_ of 1"
    ):
        backend.run(stops_early, timeout=4)


# --- requests -----------------------------------------------------------------------


def stops_when_asked(rank: int) -> None:
    if rank == 0:
        assert xla_replica.stop_requested() is None
        xla_replica.request_stop("maintenance", 3)
        xla_replica.request_stop("a second reason", 4)
    replica = xla_replica.current()
    for _ in range(3):
        request = xla_replica.stop_requested()
        asked = [
            torch.zeros(1).to(replica.device) + replica.scalar(request is not None)
        ]
        replica.sync()
        replica.all_reduce_(asked)
        if replica.fetch(asked)[0].item():
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


@pytest.mark.parametrize(
    ("signals", "error", "text"),
    [
        (["SIGTREM"], ValueError, "'SIGTREM' is not a signal here"),
        ([1000], ValueError, "1000 is not a signal here"),
        ([True], ValueError, "True is not a signal here"),
        (["SIGKILL"], ValueError, "SIGKILL cannot be caught"),
        ([], ValueError, "needs at least one signal, got none"),
        ("SIGTERM", TypeError, r"must be a sequence such as \('SIGTERM',\), got"),
        (15, TypeError, "signals must be a sequence such as"),
        (None, TypeError, "signals must be a sequence such as"),
    ],
)
def test_catch_signals_rejects(signals, error, text):
    with pytest.raises(error, match=text):
        xla_replica.catch_signals(signals)


FROM_A_THREAD = """
import threading, xla_replica

def catch():
    try:
        xla_replica.catch_signals()
    except RuntimeError as error:
        print(error)

thread = threading.Thread(target=catch)
thread.start()
thread.join()
"""


def test_a_thread_cannot_begin_to_listen():
    """In a separate process: in this one another test may have installed handlers."""
    command = [sys.executable, "-c", FROM_A_THREAD]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "nothing in this process listens for SIGINT, SIGTERM" in said


def signals_itself(rank: int) -> list[object]:
    seen: list[object] = []
    xla_replica.catch_signals(["SIGTERM", signal.SIGINT])
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)  # as if it were a copy of the first
    seen.append(xla_replica.stop_requested())
    time.sleep(1.1)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        seen.append("insisted")
    return seen


def test_a_second_signal_acts_as_if_not_caught():
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    [[request, then]] = Backend("cpu", 1).run(signals_itself)
    assert request == xla_replica.StopRequest("received SIGINT", 130)
    assert then == "insisted"
    assert handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]


OUTSIDE = """
import os, signal, xla_replica
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
"""


def test_signals_caught_outside_launch():
    assert subprocess.run([sys.executable, "-c", OUTSIDE]).returncode == 0


# --- real signals to real scripts -----------------------------------------------------


@pytest.mark.parametrize("starter", STARTERS)
def test_a_caught_signal_stops_all_replicas_at_one_update(starter, tmp_path):
    run = starter.start(tmp_path, arms=True)
    run.process.send_signal(signal.SIGTERM)
    status, error = run.ends()
    saved = [path.read_text().split(" ", 1) for path in run.files("saved")]
    assert len(saved) == run.num_replicas, error
    assert len({update for update, _ in saved}) == 1
    assert any("received SIGTERM" in request for _, request in saved)
    if starter is not TORCHRUN:  # whose own status says that it was ended by a signal
        assert status == 143, error


@pytest.mark.parametrize("what", ["armed", "received", None])
def test_a_signal_that_replicas_obey_or_have_obeyed_goes_no_further(what, tmp_path):
    """Of a signal to a process group, the leader's copy may arrive last."""
    went_on = []
    before = signal.signal(signal.SIGTERM, lambda *_: went_on.append("uncaught"))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    try:
        with forwarding(str(tmp_path)):
            if what is not None:
                (tmp_path / f"{gone.pid}.{signal.SIGTERM.value}.{what}").touch()
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert went_on == ([] if what else ["uncaught"])


@pytest.mark.parametrize(
    ("starter", "name", "workers"),
    [
        pytest.param(LOCAL, "SIGTERM", "fork", id="local-fork"),
        pytest.param(LOCAL, "SIGTERM", "spawn", id="local-spawn", marks=of_torch_alone),
        pytest.param(LOCAL, "SIGTERM", "forkserver", id="local-server", marks=SLOW),
        pytest.param(GLOO, "SIGTERM", "fork", id="gloo-fork", marks=of_torch_alone),
        pytest.param(GLOO, "SIGINT", "spawn", id="gloo-spawn", marks=SLOW),
        pytest.param(EMULATED, "SIGTERM", "fork", id="emulated-fork", marks=XLA),
        pytest.param(
            EMULATED, "SIGINT", "spawn", id="emulated-spawn", marks=[*XLA, SLOW]
        ),
        pytest.param(AS_A_TPU, "SIGTERM", "fork", id="tpu-like-fork", marks=ON_CHIPS),
        pytest.param(AS_A_TPU, "SIGINT", "spawn", id="tpu-like-spawn", marks=ON_CHIPS),
    ],
)
def test_a_signal_to_all_processes_stops_all_replicas_at_one_update(
    starter, name, workers, tmp_path
):
    """As of a machine that shuts down.

    The server that forks the replicas survives it and reports how they ended. A
    loader's worker that died of it would end the training before it has saved.
    """
    run = starter.start(tmp_path, True, workers)
    children = run.children()
    run.signal_all(signal.Signals[name])
    status, error = run.ends()
    # The script's own signal, the last one, may come when it is about to end.
    assert status in (143, -signal.Signals[name]), error
    assert "DataLoader worker" not in error
    saved = [path.read_text().split(" ", 1)[0] for path in run.files("saved")]
    assert len(saved) == run.num_replicas, error
    assert len(set(saved)) == 1
    all_end(children)


@pytest.mark.parametrize(
    ("starter", "name"),
    [
        pytest.param(LOCAL, "SIGTERM", id="local-SIGTERM"),
        pytest.param(LOCAL, "SIGINT", id="local-SIGINT"),
        pytest.param(GLOO, "SIGTERM", id="gloo-SIGTERM", marks=of_torch_alone),
        pytest.param(GLOO, "SIGINT", id="gloo-SIGINT", marks=SLOW),
        pytest.param(EMULATED, "SIGTERM", id="emulated-SIGTERM", marks=[*XLA, SLOW]),
        pytest.param(EMULATED, "SIGINT", id="emulated-SIGINT", marks=[*XLA, SLOW]),
    ],
)
def test_a_signal_that_is_not_caught_ends_the_process(starter, name, tmp_path):
    """Its replicas end with it."""
    run = starter.start(tmp_path, arms=False)
    children = run.children()
    run.process.send_signal(signal.Signals[name])
    status, error = run.ends()
    assert status == -signal.Signals[name]
    assert ("KeyboardInterrupt" in error) == (name == "SIGINT")
    assert run.files("saved") == []
    all_end(children)


@pytest.mark.parametrize(
    "starter",
    [
        pytest.param(GLOO, id="gloo", marks=of_torch_alone),
        pytest.param(EMULATED, id="emulated", marks=XLA),
    ],
)
def test_no_replica_outlives_a_killed_parent(starter, tmp_path):
    """It does not save either: another run may have begun in the same folder."""
    run = starter.start(tmp_path, arms=True)
    children = run.children()
    assert len(children) >= (1 if starter is EMULATED else run.num_replicas)
    run.process.kill()
    run.process.communicate()
    all_end(children)
    assert run.files("saved") == []
