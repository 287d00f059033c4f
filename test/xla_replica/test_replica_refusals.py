"""What cannot work is refused, in words that say what can."""

import pytest
import torch

import xla_replica
from xla_replica import DeviceTraits, LocalReplica, launch, request_stop
from xla_replica.members.member_replica import as_member

LOCAL, META, TRAITS = LocalReplica("cpu"), torch.device("meta"), DeviceTraits()
CATCH = xla_replica.catch_signals
# By error: what it says, and the call: a function and its arguments.
REFUSED = {
    TypeError: [
        ("fn must be a function, got 3", launch, 3),
        ("args must be a tuple of the arguments .*, got 'ab' .s", launch, print, "ab"),
        ("must be DeviceTraits, got None", xla_replica.register_device, "meta", None),
        ("kind must be a torch.device.", xla_replica.register_device, META, TRAITS),
        ("^scalar: ", LOCAL.scalar, torch.ones(1)),
        ("^scalar: ", LOCAL.scalar, "1"),
        ("reason must be a string, got 7", request_stop, 7),
    ],
    ValueError: [
        ("device must be one of .*'accelerator'.*'cuda'", launch, print, (), 1, "cuda"),
        ("timeout must be a finite number > 0 and <= 2000000.0",
         lambda: launch(print, timeout=0)),
        ("device must be one .*, got 'gpu'", xla_replica.default_num_replicas, "gpu"),
        ("broadcast_: source must be ", LOCAL.broadcast_, [torch.ones(1)], 1),
        ("first dimension must be 1", LOCAL.all_to_all, torch.ones(2, 2)),
        ("first dimension must be 1", LOCAL.all_to_all, torch.ones(())),
        ("seed must be an integer", LOCAL.seed, 2**64),
        ("^scalar: ", LOCAL.scalar, 1.5, torch.int32),
        ("^scalar: ", LOCAL.scalar, float("nan"), torch.int64),
        ("^scalar: ", LOCAL.scalar, float("inf"), torch.int64),
        ("^scalar: ", LOCAL.scalar, 2, torch.bool),
        ("^scalar: ", LOCAL.scalar, 0.5, torch.bool),
        ("exit_status must be .* <= 255, got 256", request_stop, "why", 256),
        ("'SIGTREM' is not a signal that can be", CATCH, ["SIGTREM"]),
        ("'S' is not .* allowed is a sequence of names", CATCH, "SIGTERM"),
        ("1000 is not a signal that can be", CATCH, [1000]),
        ("'SIGKILL' is not a signal that can be", CATCH, ["SIGKILL"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("error", "words", "call"), [
    (error, words, call) for error in REFUSED for words, *call in REFUSED[error]
])  # fmt: skip
def test_what_cannot_work_is_refused_and_leaves_nothing(error, words, call):
    before = dict(xla_replica.DEVICES)
    function, *arguments = call
    with pytest.raises(error, match=words):
        function(*arguments)
    assert before == xla_replica.DEVICES
    assert xla_replica.stop_requested() is None


@pytest.mark.skipif("torch.cuda.is_available()")
def test_an_accelerator_that_torch_does_not_find_is_refused():
    with pytest.raises(ValueError, match="device='accelerator', but torch finds"):
        launch(print, device="accelerator")


@pytest.mark.parametrize(("name", "value"), [
    # Slices that one runtime has joined are not members.
    ("MEGASCALE_NUM_SLICES", "2"),
    ("LIVE_MIN_MEMBERS", "two"),
])  # fmt: skip
def test_a_member_is_told_which_variable_is_wrong(name, value, monkeypatch):
    assert as_member(LOCAL) is LOCAL  # without a lighthouse
    monkeypatch.setenv("LIVE_LIGHTHOUSE", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(xla_replica.ReplicaError, match=name):
        as_member(LOCAL)
