"""Steps and epochs: idle ones, lockstep, and what a loop must not do."""

import copy
import pickle
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import pytest
import torch
from support.variable_batch_size.elastic import Case, Training, large_batch_run
from support.variable_batch_size.wrapping import backward, make, run_epoch
from support.xla_replica.replicas import HAS_XLA, SEVERAL_REPLICAS, row
from torch import nn

import variable_batch_size as vbs
import xla_replica
from xla_replica import ReplicaError


def test_idle_steps_are_joined_once_and_between_epochs_the_rate_may_change():
    model, sampler, wrapper = make(**IDLE | {"trace": 2 * IDLE["trace"]})
    assert len(sampler) == 2
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [wrapper.set_epoch(epoch), wrapper.set_epoch(epoch)] == [1, 0]
        assert run_epoch(model, sampler, wrapper) == [3, 2]
        wrapper.set_lr((0.01,))


def test_epochs_follow_the_sampler():
    """A forgotten optimizer.set_epoch is harmless if no replica is idle at first."""
    model, sampler, wrapper = make(trace=128)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sum(run_epoch(model, sampler, wrapper)) == 2
        assert wrapper.epoch == epoch


def test_set_epoch_past_the_end_of_the_trace():
    _, sampler, wrapper = make()
    sampler.set_epoch(7)
    assert (wrapper.set_epoch(7), wrapper.get_bs()) == (0, 0)


# Steps of 1 to 5 minibatches on 3 replicas, in some of which two of them are idle, the
# first and the last of an epoch among them.
CASE = Case((4, 12, 20, 4, 8, 16), epochs=3, optimizer="sgd-heavy-ball", lr=2**-4)
DECAY = 0.9


def run(rank: int) -> dict[str, object]:
    """Trains with a scheduler and a collective in the loop; returns what was seen."""
    training = Training(CASE, lockstep=True)
    sampler, optimizer = training.sampler, training.optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.inner, DECAY)
    met = []
    for epoch in range(CASE.epochs):
        sampler.set_epoch(epoch)
        assert optimizer.set_epoch(epoch) == 0
        plan, minibatches = sampler.plan, iter(sampler)
        for step, num in enumerate(plan.num_substeps(rank).tolist()):
            assert optimizer.is_idle == (num == 0)
            for _ in range(num):
                rows = next(minibatches)
                batch = training.inputs[rows], training.targets[rows]
                made = training.minibatch(*training.replica.send(batch))
            made = made if num else optimizer.join_step()
            assert made == 1
            scheduler.step()
            here = (plan.first_step + step, optimizer.get_lr())
            met.append(training.replica.all_gather_object(here))
    return {"weights": training.weights(), "met": met}


@pytest.mark.parametrize(
    "backend", [row("cpu", 1), row("cpu", 3, slow=HAS_XLA), row("xla", 3)]
)
def test_loops_with_schedulers_and_collectives_train_as_one_large_batch(backend):
    weights, updates = large_batch_run(CASE, decay=DECAY)
    for outcome in backend.run(run):
        torch.testing.assert_close(outcome["weights"], weights)
        # Replicas met after the same updates, with the same learning rates.
        assert [each for each in outcome["met"] if len({*each}) > 1] == []
        assert [each[0][0] for each in outcome["met"]] == [*range(len(updates))]


class Loop(NamedTuple):
    model: nn.Module
    sampler: vbs.CustomSampler
    wrapper: vbs.ElasticOptimizer


def passes(t: Loop, scale: float = 1.0) -> None:
    next(t.wrapper.minibatches)
    backward(t.model, scale)


def failure(t: Loop) -> None:
    with pytest.raises(ZeroDivisionError):
        ACTIONS["minibatch"](t)


def half_a_pass(t: Loop) -> None:
    hook = t.model.weight.register_hook(lambda gradient: 1 / 0)
    with suppress(ZeroDivisionError):
        passes(t)
    hook.remove()


def share(t: Loop) -> None:
    inner, replica = torch.optim.SGD([nn.Parameter(torch.ones(1))]), t.wrapper.replica
    t.sampler.other = vbs.LinearRuleOptimizer(inner, t.sampler, 32, replica=replica)


def counted_twice(parameters: Any, lr: float) -> torch.optim.SGD:
    parameters, count = [*parameters], torch.autograd.graph.increment_version
    for parameter in parameters:  # as where an addition writes twice
        parameter.register_post_accumulate_grad_hook(lambda p: count(p.grad))
    return torch.optim.SGD(parameters, lr)


ACTIONS = {
    "take": lambda t: next(t.wrapper.minibatches),
    "pass": passes,
    "pass of zero": lambda t: passes(t, 0.0),
    "pass of thousands": lambda t: passes(t, 1e3),
    "pass of NaN": lambda t: passes(t, torch.nan),
    "pass of data from elsewhere": lambda t: backward(t.model),
    "pass of a copy": lambda t: backward(copy.deepcopy(t.model)),
    "pass of a saved copy": lambda t: backward(pickle.loads(pickle.dumps(t.model))),
    "step": lambda t: t.wrapper.step(),
    "minibatch": lambda t: (passes(t), t.wrapper.step()),
    "failure": failure,
    "epoch": lambda t: run_epoch(t.model, t.sampler, t.wrapper),
    "zero": lambda t: t.model.zero_grad(),
    "zero in place": lambda t: t.model.zero_grad(set_to_none=False),
    # Where torch does not count it, but the host sees it.
    "zero data": lambda t: [p.grad.data.zero_() for p in t.model.parameters()],
    "zero by the wrapper": lambda t: t.wrapper.zero_grad(),
    "freeze": lambda t: t.model.bias.requires_grad_(False),
    "unfreeze": lambda t: t.model.bias.requires_grad_(True),
    "step of no weight": lambda t: t.wrapper.step(weight=0),
    "clip": lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 0.5),
    "clamp": lambda t: nn.utils.clip_grad_value_(t.model.parameters(), 0.5),
    "scale": lambda t: t.model.weight.grad.mul_(0.5),
    "replace": lambda t: setattr(t.model.weight, "grad", t.model.weight.grad / 2),
    "scale data": lambda t: t.model.weight.grad.data.mul_(0.5),  # torch counts nothing
    "half a pass": half_a_pass,
    "reload": lambda t: t.model.load_state_dict(
        copy.deepcopy(t.model.state_dict()), assign=True
    ),
    "add to the inner one": lambda t: t.wrapper.inner.add_param_group(
        {"params": [nn.Parameter(torch.zeros(2))]}
    ),
    "step the inner one": lambda t: t.wrapper.inner.step(),
    "begin": lambda t: t.wrapper.set_epoch(0),
    "begin another": lambda t: t.wrapper.set_epoch(1),
    "move the sampler": lambda t: t.sampler.set_epoch(1),
    "set the rate": lambda t: t.wrapper.set_lr((0.5,)),
    "join": lambda t: t.wrapper.join_step(),
    "attach": lambda t: t.wrapper.attach(print),
    "attach another": lambda t: t.wrapper.attach(repr),
    "attach a failure": lambda t: t.wrapper.attach(lambda u: u.idle or 1 / 0),
    "share": share,
}
CHANGES = ("clip", "clamp", "scale", "replace", "scale data")
ONE, TWO, THREE = {"trace": 32}, {"trace": 64}, {"trace": 96}
PADDED = {"trace": 33, "pads": True, "reduction": "sum"}
EXACT = {"trace": [128] * 3, "exact": True}  # of two epochs
LOST = "1 minibatches would be lost: remove model.zero_grad"
CHANGED = r"max_grad_norm=, .*register_step_pre_hook"
NO_PASS = r"call loss.backward\(\) before every step"
KEEPS = r"every minibatch .* requires_grad_\(False\)"
# How the wrapper is made, what the loop does, of which the last is refused, and why.
ON_ANY_REPLICA = [
    *(
        (THREE, f"{zero}, minibatch, {zero}, pass, step", LOST)
        for zero in ("zero", "zero in place", "zero data")
    ),
    *(
        (TWO, f"{before}pass, {change}, step", CHANGED)
        for before in ("", "minibatch, ", "freeze, zero, minibatch, ")
        for change in CHANGES
    ),
    (TWO | {"inner": counted_twice}, "minibatch, zero in place, pass, step", LOST),
    (TWO, "half a pass, pass of data from elsewhere, step", "backward.. has raised"),
    (TWO, "take, step", NO_PASS),
    # Hooks do not travel with a model's copies.
    (TWO, "take, pass of a copy, step", NO_PASS),
    (TWO, "take, pass of a saved copy, step", NO_PASS),
    (TWO, "minibatch, take, step", NO_PASS),
    (TWO, "freeze, zero, minibatch, unfreeze, pass, step", "changed within a step"),
    (TWO | {"noise": True}, "pass, pass of data from elsewhere", "two gradients"),
    (ONE | {"reduction": "sum"}, "pass, step of no weight", "gradient is not zero"),
    ({}, "zero by the wrapper, pass, zero by the wrapper", KEEPS),
    ({}, "minibatch, zero by the wrapper, pass, zero by the wrapper", KEEPS),
    ({}, "add to the inner one, pass, step", "through the wrapper's add_param_group"),
    ({}, "reload, pass, step", r"load_state_dict\(..., assign=True\)"),
    ({}, "epoch, take, step", "after the last of the 3 steps of epoch 0"),
    ({}, "join", "with lockstep=True, in"),
    (TWO | {"lockstep": True}, "pass, join", "in steps without a minibatch"),
    (ONE, "pass of data from elsewhere, step", r"batch_sampler=sampler\), or iterate"),
    (ONE, "begin another, pass, step", "at step 0 of epoch 1 and the sampler at ep"),
    # The mask of what fills up a minibatch was forgotten.
    (PADDED, "minibatch, pass, step", "31 of 32 samples of this minibatch are"),
    # Who reads ahead by itself, or an epoch that the sampler alone begins: its first
    # minibatch would be rounded as one of the epoch before.
    (EXACT | TWO, "take, pass, step", r"replica.loader\(loader\)"),
    (EXACT, "begin, epoch, move the sampler, pass, step", r"set_epoch\(epoch\) before"),
]
BEGIN_FIRST = r"call optimizer.set_epoch\(0\), where"
# Steps 0, 2, 3 and 5 have no minibatch for replica 1.
IDLE = {"trace": [32, 64, 32, 32, 64, 32], "replicas": 2, "rank": 1}
BESIDE_ONE = IDLE | {"rank": 0}
FULL = {"trace": 128, "replicas": 2}
ON_SEVERAL = [
    (BESIDE_ONE, "pass, step", BEGIN_FIRST),
    (IDLE, "pass, step", BEGIN_FIRST),
    (IDLE, "share, begin", r"2 optimizers .* lockstep=True"),
    # The idle step after it was not joined: an error, not a hang.
    (IDLE, "attach a failure, begin, failure, minibatch", "1 is idle in step 2 and"),
    # Replica 1 has done step 0 with another rate.
    (BESIDE_ONE, "begin, set the rate, pass, step", "before optimizer.set_epoch"),
    # Or without what is attached.
    (IDLE, "attach, begin, attach another", "has joined 1 updates of epoch 0"),
    (FULL, "begin, minibatch, begin another", "abandoned after 0 of 2 steps: to train"),
    (FULL, "begin, epoch, begin", "epoch 0 has been trained; another pass needs"),
    (IDLE | {"lockstep": True}, "begin, pass, step", r"call join_step\(\)"),
    (EXACT | ONE, "minibatch, pass of thousands, step", "different gradients when rer"),
]
OF_THE_INNER_ONE = [
    ({}, "pass, step the inner one", "of a wrapped SGD was called"),
    (ONE, "minibatch, step the inner one", r"Call the wrapper's step"),
]


def loop(actions: str, **options: Any) -> Any:
    """Returns a loop that has done all but the last action, and that one."""
    *before, last = actions.split(", ")
    found = Loop(*make(**options))
    for action in before:
        ACTIONS[action](found)
    return found, ACTIONS[last]


@pytest.mark.parametrize(("error", "options", "actions", "message"), [
    *((ValueError, *each) for each in ON_ANY_REPLICA),
    *((ReplicaError, *each) for each in ON_SEVERAL),
    *((RuntimeError, *each) for each in OF_THE_INNER_ONE),
])  # fmt: skip
def test_the_last_of_these_actions_is_refused(error, options, actions, message):
    found, last = loop(actions, **options)
    before = copy.deepcopy(found.model.state_dict())
    with pytest.raises(error, match=message):
        last(found)
    torch.testing.assert_close(found.model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(("options", "actions"), [
    (TWO, "pass of zero, step, minibatch"),  # as the message says
    (TWO, "pass of NaN, step, minibatch"),  # which equals itself
    (THREE | {"inner": counted_twice}, "epoch"),
    (BESIDE_ONE, "attach, begin, attach another"),
    (FULL, "begin, minibatch, minibatch, attach"),  # the epoch has ended
    (TWO, "begin, minibatch, minibatch, attach"),
    (IDLE, "begin, epoch, attach"),
])  # fmt: skip
def test_what_is_like_it_and_harmless_is_not_refused(options, actions):
    found, last = loop(actions, **options)
    last(found)


@pytest.mark.parametrize(("options", "actions", "message", "then"), [
    ({}, "minibatch, begin", "is abandoned after 0 of 3", [0, 1, 0, 0, 1, 0, 0, 1]),
    (ONE, "begin, epoch, begin", "epoch 0 has been trained; another pass", [1] * 8),
    ({"trace": [32, 32], "rank": 1, "replicas": 2}, "begin, attach",
     "call attach before optimizer.set_epoch", []),
])  # fmt: skip
def test_what_may_be_a_mistake_warns(options, actions, message, then, caplog):
    """An epoch that begins anew has lost its gradients."""
    found, last = loop(actions, **options)
    assert not caplog.text
    last(found)
    assert message in caplog.text
    assert not found.model.weight.grad.any()
    assert run_epoch(*found) == then


def makes_mistakes(rank: int) -> None:
    """Asserts what is told on a device, where the last loop does nothing wrong."""
    for actions, message in (
        ("pass, clip", "max_grad_norm="),
        ("minibatch, zero in place, pass", r"remove model.zero_grad\(\)"),
        ("take", r"call loss.backward\(\)"),
        ("pass", None),
    ):
        found, last = loop(actions, trace=192, replica=xla_replica.current())
        last(found)
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            found.wrapper.step()


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_mistakes_are_noticed_on_every_backend(backend):
    backend.run(makes_mistakes)
