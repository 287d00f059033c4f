"""What cannot work is refused, in words that say what can."""

from __future__ import annotations

import pytest
import torch

import xla_replica
from xla_replica import (
    DeviceTraits,
    LocalReplica,
    Stopped,
    default_num_replicas,
    register_device,
    request_stop,
)
from xla_replica.members.entering import as_member

LOCAL, META = LocalReplica("cpu"), torch.device("meta")
ONE = torch.ones(1, requires_grad=True)


def launch(**arguments):
    return lambda: xla_replica.launch(**{"fn": print, **arguments})


def registered(*arguments):
    return lambda: xla_replica.register_backend(*arguments)


def caught(signals):
    return lambda: xla_replica.catch_signals(signals)


def scalar(value, dtype=torch.float32):
    return lambda: LOCAL.scalar(value, dtype)


REFUSED = {
    TypeError: [
        (launch(fn=3), "fn must be a function, got 3"),
        (launch(args="ab"), "args must be a tuple of the arguments .*, got 'ab' .str"),
        (registered(3, str, str), r"device must be a name as `launch` takes it, got 3"),
        (registered("a", "b", str), "register_backend: find must be a function, g"),
        (registered("a", str, None), "register_backend: replica must be a fun"),
        (registered("a", str, str, 3), "register_backend: launch must be a fu"),
        (lambda: register_device("meta", None), "must be DeviceTraits, got None"),
        (lambda: register_device(META, DeviceTraits()), "kind must be a torch.device."),
        (lambda: xla_replica.traits("cpu"), "got 'cpu'; for a name give torch.device"),
        (lambda: xla_replica.count("cpu").__enter__(), "replica must be a Repl"),
        (lambda: LOCAL.seed(1.5), r"seed must be an integer .* got 1\.5"),
        (scalar(torch.ones(1)), "^scalar: "),
        (scalar("1"), "^scalar: "),
        (lambda: xla_replica.AccumulationHook(3), "must be a function, got 3"),
        (lambda: xla_replica.AccumulationNote(3), "must be a function, got 3"),
        (lambda: xla_replica.lazy_operation(3), "must be a function, got 3"),
        (lambda: LOCAL.on_gradient(ONE, 3), "must be a function, got 3"),
        (lambda: Stopped(7), "reason must be a string, got 7"),
        (lambda: request_stop(7), "reason must be a string, got 7"),
        (caught("SIGTERM"), r"must be a sequence such as \('SIGTERM',\), got"),
        (caught(15), "signals must be a sequence such as"),
    ],
    ValueError: [
        (launch(num_replicas=0), "num_replicas must be an integer >= 1, got 0"),
        (launch(device="cuda"), "device must be one of .*'accelerator'.*got 'cuda'"),
        (launch(timeout=0), "timeout must be a finite number > 0 and <= 2000000.0"),
        (lambda: default_num_replicas("gpu"), "device must be one of .*, got 'gpu'"),
        (lambda: default_num_replicas("cpu", 0), "on_cpu must be an integer >= 1"),
        (lambda: LOCAL.broadcast_([torch.ones(1)], 1), "broadcast_: source must be "),
        (lambda: LOCAL.all_to_all(torch.ones(2, 2)), "first dimension must be 1"),
        (lambda: LOCAL.all_to_all(torch.ones(())), "first dimension must be 1"),
        (lambda: LOCAL.seed(2**64), "seed must be an integer"),
        (lambda: LOCAL.loader([], 0), "prefetch must be an integer >= 1, got 0"),
        (scalar(1.5, torch.int32), "^scalar: "),
        (scalar(float("nan"), torch.int64), "^scalar: "),
        (scalar(float("inf"), torch.int64), "^scalar: "),
        (scalar(2, torch.bool), "^scalar: "),
        (scalar(0.5, torch.bool), "^scalar: "),
        (lambda: Stopped("why", 256), "exit_status must be .* <= 255, got 256"),
        (lambda: request_stop("why", 256), "exit_status must be .* <= 255, got 256"),
        (caught(["SIGTREM"]), "'SIGTREM' is not a signal here"),
        (caught([1000]), "1000 is not a signal here"),
        (caught(["SIGKILL"]), "SIGKILL cannot be caught"),
        (caught([]), "needs at least one signal, got none"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [(error, *case) for error, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_work_is_refused_and_leaves_nothing(error, call, words):
    before = dict(xla_replica.DEVICES)
    with pytest.raises(error, match=words):
        call()
    assert before == xla_replica.DEVICES
    assert xla_replica.stop_requested() is None


@pytest.mark.skipif("torch.cuda.is_available()")
def test_an_accelerator_that_torch_does_not_find_is_refused():
    with pytest.raises(ValueError, match="device='accelerator', but torch finds"):
        launch(device="accelerator")()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        # Slices that one runtime has joined are not members.
        ("MEGASCALE_NUM_SLICES", "2", "MEGASCALE_NUM_SLICES"),
        ("LIVE_MIN_MEMBERS", "two", "LIVE_MIN_MEMBERS='two'"),
    ],
)
def test_a_member_is_told_which_variable_is_wrong(name, value, words, monkeypatch):
    assert as_member(LOCAL) is LOCAL  # without a lighthouse
    monkeypatch.setenv("LIVE_LIGHTHOUSE", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(xla_replica.ReplicaError, match=words):
        as_member(LOCAL)
