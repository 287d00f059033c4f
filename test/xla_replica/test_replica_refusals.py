"""What cannot work is refused, in words that say what can."""

import gc
import itertools
import weakref

import pytest
import torch
from support.scripts import python
from support.xla_replica.replicas import Backend, of_torch_alone
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
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


# --- models that something else sums the gradients of ---------------------------------


def optimizer_of(parameters) -> vbs.ConstantOptimizer:
    sampler = vbs.CustomSampler(range(64), 8, minibatch_size=4, verbose=False)
    return vbs.ConstantOptimizer(torch.optim.SGD(parameters, 0.1), sampler)


def refused(call, *arguments) -> None:
    says = "of a DistributedDataParallel model.*sums their gradients in every backward "
    says += "pass.*Train the bare module, model.module in place of model"
    with pytest.raises(TypeError, match=says):
        call(*arguments)


def wraps_its_model(rank: int) -> None:
    model, optimizer = nn.Linear(3, 1), optimizer_of(nn.Linear(3, 1).parameters())
    wrapper = DistributedDataParallel(model)
    refused(optimizer_of, wrapper.parameters())
    refused(optimizer_of, model.parameters())
    refused(optimizer.add_param_group, {"params": [model.weight]})
    # Without the wrapper they can be trained, even while it waits to be collected.
    gone = weakref.ref(wrapper)
    gc.disable()
    wrapper.itself = wrapper
    del wrapper
    assert gone() is not None
    optimizer_of(model.parameters())
    assert gone() is None
    xla_replica.current().check_parameters([])


def wraps_its_model_later(rank: int) -> None:
    """After no step, and after two, which are the first that overlap with others."""
    for num_steps, as_view in itertools.product((0, 2), (False, True)):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        optimizer = optimizer_of(model.parameters())
        minibatches = iter(optimizer.sampler)
        for _ in range(num_steps):
            next(minibatches)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        wrapper = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        next(minibatches)
        wrapper(torch.ones(1, 3)).sum().backward()
        refused(optimizer.step)


@of_torch_alone
@pytest.mark.parametrize("wraps", [wraps_its_model, wraps_its_model_later])
def test_a_ddp_models_parameters_are_refused_at_once_or_at_the_first_step(wraps):
    Backend("cpu", 2).run(wraps)


# --- where the names of POSIX are missing, as on Windows ------------------------------

IMPORTS = """
import os, signal, sys
import torch  # has a build for Windows

for name in ("SIGHUP", "SIGKILL", "SIGSTOP", "pthread_sigmask"):
    delattr(signal, name)
for name in ("fork", "register_at_fork", "setpgid"):
    delattr(os, name)
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
import grab_xla, per_sample_grad, rigl_xla, variable_batch_size as vbs, xla_replica
import variable_batch_size.command_line

def train(rank):
    return xla_replica.current().num_replicas

assert xla_replica.launch(train, num_replicas=1, device="cpu") == [1]
try:
    xla_replica.launch(train, num_replicas=2, device="cpu")
except NotImplementedError as error:
    print(error)
"""


@of_torch_alone
def test_where_there_are_no_posix_signals_one_replica_runs():
    assert "on Windows train with num_replicas=1" in python("-c", IMPORTS).stdout
