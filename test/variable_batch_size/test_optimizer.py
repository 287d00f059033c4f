"""The optimizer wrappers on one replica; test_elastic_family.py has several."""

import dataclasses
import gc
import inspect
import logging
import re
import sys
import types
import typing
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from support.variable_batch_size.wrapping import backward, idle_replica, make, run_epoch
from support.xla_replica.replicas import row
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.data.schedule import OnEnd, Schedule
from variable_batch_size.integrations import steps
from variable_batch_size.step.run import ElasticOptions, Run


def test_what_can_be_asked_and_is_logged(caplog):
    caplog.set_level(logging.INFO)
    model, sampler, wrapper = make(log_steps=2)
    seen = []
    for _ in sampler:
        seen.append((wrapper.get_bs(), round(wrapper.current_lr(), 6)))
        backward(model)
        wrapper.step()
    first, second = "step 0: batch size 64, ", "step 2: batch size 96, "
    told = [f"{first}learning rate 0.2", f"{second}learning rate 0.3"]
    assert caplog.messages == told
    assert seen == [(64, 0.2)] * 2 + [(96, 0.3)] * 6
    assert (wrapper.get_bs(), wrapper.epoch) == (0, 0)
    assert wrapper.current_lr() == pytest.approx(0.3)  # the last update's
    wrapper.set_lr((0.5,))
    assert wrapper.get_lr() == (0.5,)
    with pytest.raises(AttributeError):  # what replicas have compared
        wrapper.max_grad_norm = 1.0


def test_the_place_is_that_of_the_next_minibatch():
    model, sampler, wrapper = make(trace=(64, 96, 96, 64))
    places = [wrapper.place]
    for _ in sampler:
        backward(model)
        wrapper.step()
        places.append(wrapper.place)
    expected = [(0, step, n) for step, num in enumerate((2, 3, 3)) for n in range(num)]
    assert places == [*expected, (0, 3, 0)]  # after the last
    sampler.set_epoch(1)
    wrapper.set_epoch(1)
    assert wrapper.place == (1, 0, 0)
    _, _, idle = idle_replica()
    idle.set_epoch(0)  # joins step 0
    assert idle.place._asdict() == {"epoch": 0, "step": 1, "substep": 0}


# The updates that every minibatch of `make`'s epoch has made.
EPOCH = [0, 1, 0, 0, 1, 0, 0, 1]


def test_losses_that_accelerate_divides_too_are_refused(monkeypatch):
    state = types.SimpleNamespace(num_steps=4)
    module = types.SimpleNamespace(GradientState=lambda: state)
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        run_epoch(*make())
    state.num_steps = 1
    assert run_epoch(*make()) == EPOCH


def test_it_is_an_optimizer_with_train_and_eval_where_the_inner_one_has_them():
    class Averaging(SGD):
        def train(self):
            return "trains"

    model, _, wrapper = make(inner=Averaging)
    assert isinstance(wrapper, torch.optim.Optimizer)
    for name in ("param_groups", "state", "defaults"):
        assert getattr(wrapper, name) is getattr(wrapper.inner, name)
    assert "LinearRuleOptimizer" in repr(wrapper)
    wrapper.zero_grad()
    wrapper.zero_grad(set_to_none=True)
    assert model.weight.grad is not None
    assert wrapper.train() == "trains"
    assert not hasattr(wrapper, "eval")


def test_step_hooks_run_once_an_update_around_the_inner_step():
    model, sampler, wrapper = make()
    events, gradient = [], model.weight.grad
    wrapper.register_step_pre_hook(lambda *_: events.append(float(gradient[0, 0])))
    wrapper.register_step_post_hook(lambda *_: events.append("post"))
    handle = register_optimizer_step_post_hook(lambda o, *_: events.append(o))
    try:
        run_epoch(model, sampler, wrapper)
    finally:
        handle.remove()
    assert events == [1.0, "post", wrapper.inner] * 3  # the mean, not the sum


def test_after_an_exception_in_the_update_training_can_go_on():
    """The learning rate and the weight decay are again what they were."""
    model, sampler, wrapper = make(cls=vbs.LinearRuleMomentumOptimizer)
    [group] = wrapper.param_groups
    group["weight_decay"] = 0.25

    def fail(*_):
        raise ArithmeticError("diverged")

    handle, returned = wrapper.register_step_pre_hook(fail), []
    for _ in sampler:
        backward(model)
        try:
            returned.append(wrapper.step())
        except ArithmeticError:
            returned.append("lost")
            handle.remove()
            assert (wrapper.get_lr(), group["weight_decay"]) == ((0.1,), 0.25)
            group["weight_decay"] = 0.0
    assert returned == [0, "lost", *EPOCH[2:]]
    assert torch.equal(model.weight.data, torch.full((1, 2), -0.3 * 2))


@pytest.mark.parametrize("value", [float("nan"), "0.1", torch.tensor(0.1), None])
def test_a_learning_rate_is_a_finite_number(value):
    """torch's SGD takes NaN, after which every weight is NaN, and later anything."""
    model, sampler, optimizer = make()
    optimizer.param_groups[0]["lr"] = value  # as an attached function might
    told = "learning rate of group 0 now must be a finite number >= 0, got "
    with pytest.raises((TypeError, ValueError), match=told):
        run_epoch(model, sampler, optimizer)
    assert not any(parameter.any() for parameter in model.parameters())
    with pytest.raises((TypeError, ValueError), match="set_lr: the learning rate must"):
        optimizer.set_lr((value,))


def test_a_scaler_of_gradients_is_refused():
    model, _, wrapper = make()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    for prepare in (lambda: None, lambda: scaler.unscale_(wrapper)):
        prepare()
        with pytest.raises(TypeError, match="GradScaler is not supported"):
            scaler.step(wrapper)


def test_an_inner_optimizer_may_be_wrapped_again_or_used_alone_later():
    """Wrappers that are dropped are gone at once, without a collection."""
    model, sampler, wrapper = make(trace=32)
    inner, again = wrapper.inner, vbs.ConstantOptimizer(wrapper.inner, sampler)
    next(wrapper.minibatches)
    backward(model)
    assert again.step() == 1
    with pytest.raises(RuntimeError, match="of a wrapped SGD was called"):
        inner.step()
    left = weakref.WeakSet([wrapper, again])
    gc.disable()
    del wrapper, again
    num_left = len(left)
    gc.enable()
    assert num_left == 0
    inner.step()


def begin(model, sampler, wrapper, num_minibatches: int):
    """Trains on so many; returns the loop over the sampler that is under way."""
    minibatches = iter(sampler)
    for _ in range(num_minibatches):
        next(minibatches)
        backward(model)
        wrapper.step()
    return minibatches


@pytest.mark.parametrize("left_after", [1, 2, 3])
def test_a_new_loop_goes_on_where_training_stands(left_after):
    """Breaking a loop off, even in mid-step, loses nothing; the older one is over."""
    model, sampler, wrapper = make()
    expected = list(sampler)  # a look, before training
    older = begin(model, sampler, wrapper, left_after)
    next(older)  # which nobody trains
    assert list(sampler) == expected[left_after:]
    assert run_epoch(model, sampler, wrapper) == EPOCH[left_after:]
    with pytest.raises(RuntimeError, match="a newer loop over the sampler has taken"):
        next(older)


def test_a_loop_follows_a_load_and_what_was_read_before_is_refused():
    model, sampler, wrapper = make()
    expected = list(sampler)
    state = wrapper.state_dict()
    minibatches = begin(model, sampler, wrapper, 2)
    assert next(minibatches) == expected[2]
    wrapper.load_state_dict(state)
    backward(model)
    with pytest.raises(ValueError, match="begin a new loop after load_state_dict"):
        wrapper.step()
    model.zero_grad()
    assert next(minibatches) == expected[0]
    assert run_epoch(model, sampler, wrapper) == EPOCH


def test_state_dict_hooks_run():
    (_, _, wrapper), calls = make(), []
    saving = ["state_dict_pre", "state_dict_post"]
    hooks = [*saving, *(f"load_{name}" for name in saving)]
    for name in hooks:
        getattr(wrapper, f"register_{name}_hook")(lambda *_, n=name: calls.append(n))
    wrapper.load_state_dict(wrapper.state_dict())
    assert calls == hooks


# --- what one rule's wrapper has to itself, and options with types for editors ------


def test_the_wrappers_options_are_those_of_elastic_optimizer_and_their_rules():
    """`typing.Unpack[ElasticOptions]` is what a type checker reads."""
    own = {field.name.removesuffix("_options") for field in dataclasses.fields(Run)}
    own -= {"inner", "sampler", "sums", "rule", "log_steps", "ref_batchsize"}
    own |= {"exact", "momentum_correction", "decay_per_sample"}
    assert {*typing.get_type_hints(ElasticOptions)} == own
    names = [name for name in vbs.__all__ if name.endswith("RuleOptimizer")]
    for name in ["ElasticOptimizer", *names]:
        *_, rest = inspect.signature(getattr(vbs, name)).parameters.values()
        assert rest.annotation == "Unpack[ElasticOptions]"
    for on_end in typing.get_args(OnEnd):
        Schedule(vbs.Trace([2]), 4, 2, on_end)
    # And of its rule alone.
    _, _, wrapper = make(cls=vbs.LinearRuleMomentumOptimizer, weight_decay=0.5)
    assert wrapper.param_groups[0]["weight_decay"] == 0.5
    noise = vbs.NoiseOptions(time_constant=7)
    for given, options in ((noise, noise), (False, vbs.NoiseOptions())):
        _, _, wrapper = make(cls=vbs.AdaScaleOptimizer, noise=given)
        assert wrapper.noise.options == options


def told_of_ties(rank: int, way: str, folder: Path) -> list[str]:
    """Returns the warnings of a wrapper that is given a model with two tied layers."""
    replica = xla_replica.current()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model.all_tied_weights_keys = {"1.weight": "0.weight"}  # as transformers' models
    model = replica.setup(model) if way == "setup" else model.to(replica.device)
    if way == "parted":
        model[1].weight = nn.Parameter(2 * model[0].weight.detach())
    own, _, optimizer = make(replica=replica)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        vbs.Checkpointer(folder, optimizer, model=model.append(own))
    return [str(each.message) for each in told]


@pytest.mark.parametrize("backend", [row("cpu", 1), row("xla", 1)])
def test_a_tie_that_a_move_has_lost_is_told(backend, tmp_path):
    found = {
        way: backend.run(told_of_ties, way, tmp_path)[0]
        for way in ("moved", "setup", "parted")
    }
    lost = r"1\.weight and 0\.weight were tied, .* call replica\.setup\(model\)"
    assert len(found["moved"]) == (backend.device == "xla")
    assert all(re.match(lost, each) for each in found["moved"])
    assert found["setup"] == found["parted"] == []


SHARED = {"trace": [32, 64, 32, 32, 64, 32], "replicas": 2}


@pytest.mark.parametrize("options", [{}, SHARED, {**SHARED, "rank": 1}])
def test_a_trainer_whose_batches_are_steps_trains_as_a_loop(options):
    """Its optimizer makes an update for each, also where this replica is idle."""
    expected, dealt, loop = make(**options)
    loop.set_epoch(0)
    run_epoch(expected, dealt, loop)
    model, sampler, wrapper = make(cls=steps.StepOptimizer, lockstep=True, **options)
    trainer, data = steps.Steps(), vbs.SeededDataset(range(256), seed=0)
    trainer.batches, trainer.loader = sampler, DataLoader(data, batch_sampler=sampler)
    own: list[object] = []

    def closure() -> str:
        for number, _ in enumerate(own):
            if number:
                wrapper.end_minibatch()
            backward(model)
        return "a loss"

    with pytest.raises(ValueError, match=r"epoch 0 after 3 updates, the sampler has 0"):
        trainer.begin(0, wrapper, 3)
    trainer.begin(0, wrapper, 0)
    next(batches := iter(trainer))
    sampler.ledger.replan(sampler.schedule)
    with pytest.raises(ValueError, match="change_batch_size within an epoch"):
        next(batches)
    for minibatches in trainer:
        own[:] = minibatches
        assert wrapper.step(closure) == "a loss"
        assert wrapper.step() is None
    assert sampler.ledger.global_step == len(sampler.schedule.trace)
    assert torch.equal(model.weight, expected.weight)
