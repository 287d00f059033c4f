"""The optimizer wrappers on one replica; test_elastic_family.py has several."""

from __future__ import annotations

import copy
import gc
import logging
import sys
import types
import weakref

import pytest
import torch
from support.variable_batch_size import noise
from support.variable_batch_size.wrapping import (
    CPU,
    backward,
    idle_replica,
    make,
    run_epoch,
)
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
from xla_replica import LocalReplica, ReplicaError


def test_what_can_be_asked():
    model, sampler, wrapper = make()
    seen = []
    for _ in sampler:
        seen.append((wrapper.get_bs(), round(wrapper.current_lr(), 6)))
        backward(model)
        wrapper.step()
    assert seen == [(64, 0.2)] * 2 + [(96, 0.3)] * 6
    assert wrapper.get_bs() == 0
    assert wrapper.current_lr() == pytest.approx(0.3)  # the last update's
    assert wrapper.epoch == 0
    wrapper.set_lr((0.5,))
    assert wrapper.get_lr() == (0.5,)


def test_settings_that_replicas_have_compared_cannot_be_assigned():
    _, _, wrapper = make(max_grad_norm=0.5)
    with pytest.raises(AttributeError):
        wrapper.max_grad_norm = 1.0
    assert wrapper.max_grad_norm == 0.5


def test_a_layer_may_be_frozen_after_gradients_were_thrown_away():
    """As in a function that Lightning calls before the first epoch."""
    for frozen in ("weight", "bias"):
        model, sampler, wrapper = make()
        model.zero_grad()
        getattr(model, frozen).requires_grad_(False)
        assert run_epoch(model, sampler, wrapper) == [0, 1, 0, 0, 1, 0, 0, 1]
        moved = {name for name, p in model.named_parameters() if (p != 0).any()}
        assert moved == {"weight", "bias"} - {frozen}


def test_parameters_that_were_replaced_are_named_as_a_cause():
    model, sampler, wrapper = make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match=r"load_state_dict\(..., assign=True\)"):
        run_epoch(model, sampler, wrapper)


def test_it_has_train_and_eval_where_the_optimizer_has_them():
    class Averaging(SGD):
        def train(self):
            return "trains"

    _, _, wrapper = make(inner=Averaging)
    assert wrapper.train() == "trains"
    assert not hasattr(wrapper, "eval")
    assert not hasattr(make()[2], "train")


def test_losses_that_accelerate_divides_too_are_refused(monkeypatch):
    state = types.SimpleNamespace(num_steps=4)
    module = types.SimpleNamespace(GradientState=lambda: state)
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        run_epoch(*make())
    state.num_steps = 1
    assert sum(run_epoch(*make())) == 3


def test_it_is_an_optimizer():
    model, _, wrapper = make()
    assert isinstance(wrapper, torch.optim.Optimizer)
    assert wrapper.param_groups is wrapper.inner.param_groups
    assert wrapper.state is wrapper.inner.state
    assert wrapper.defaults is wrapper.inner.defaults
    assert "LinearRuleOptimizer" in repr(wrapper)
    wrapper.zero_grad()
    wrapper.zero_grad(set_to_none=True)
    assert model.weight.grad is not None


def test_log_steps(caplog):
    model, sampler, wrapper = make(log_steps=2)
    with caplog.at_level(logging.INFO):
        run_epoch(model, sampler, wrapper)
    assert [r.message for r in caplog.records] == [
        "step 0: batch size 64, learning rate 0.2",
        "step 2: batch size 96, learning rate 0.3",
    ]


# --- hooks and exceptions -----------------------------------------------------------


def test_step_hooks_run_once_an_update_around_the_inner_step():
    model, sampler, wrapper = make()
    events, calls = [], []
    wrapper.register_step_pre_hook(
        lambda o, *_: events.append(("pre", float(model.weight.grad[0, 0])))
    )
    wrapper.register_step_post_hook(lambda o, *_: events.append(("post", None)))
    handle = register_optimizer_step_post_hook(lambda o, *_: calls.append(o))
    try:
        run_epoch(model, sampler, wrapper)
    finally:
        handle.remove()
    assert events == [("pre", 1.0), ("post", None)] * 3  # the mean, not the sum
    assert calls == [wrapper.inner] * 3


def test_after_an_exception_in_the_update_training_can_go_on():
    """The learning rate and the weight decay are again what they were."""
    model, sampler, wrapper = make(cls=vbs.LinearRuleMomentumOptimizer)
    wrapper.param_groups[0]["weight_decay"] = 0.25
    failures = [ArithmeticError("diverged")]

    def fail_once(*_):
        if failures:
            raise failures.pop()

    wrapper.register_step_pre_hook(fail_once)
    returned = []
    for _ in sampler:
        backward(model)
        try:
            returned.append(wrapper.step())
        except ArithmeticError:
            returned.append("lost")
            assert wrapper.get_lr() == (0.1,)
            assert wrapper.param_groups[0]["weight_decay"] == 0.25
            wrapper.param_groups[0]["weight_decay"] = 0.0
    assert returned == [0, "lost", 0, 0, 1, 0, 0, 1]
    assert torch.equal(model.weight.data, torch.full((1, 2), -0.3 * 2))


def test_an_exception_before_an_idle_step_ends_training():
    """The step was not joined, so training cannot continue: an error, not a hang."""
    model, _sampler, wrapper = idle_replica()

    def fail(update):
        if not update.idle:
            raise ArithmeticError("in a callback")

    wrapper.attach(fail)
    wrapper.set_epoch(0)
    backward(model)
    with pytest.raises(ArithmeticError):
        wrapper.step()
    backward(model)
    with pytest.raises(ReplicaError, match="replica 1 is idle in step 2 of"):
        wrapper.step()


# --- arguments ----------------------------------------------------------------------


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "lars"}, ValueError, "rule='lars' is unknown"),
        ({"ref_batchsize": None}, TypeError, "rule 'linear' needs ref_batchsize="),
        ({"ref_batchsize": 0}, ValueError, "ref_batchsize must .* > 0, got 0"),
        ({"log_steps": 2.5}, TypeError, "log_steps must be an int"),
        ({"overlap": "no"}, TypeError, "overlap must be True or False"),
        ({"decay_per_sample": "no"}, TypeError, "decay_per_sample must be True or"),
        ({"momentum_correction": 1}, TypeError, "momentum_correction must be True or"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm must"),
        ({"clip": 1}, TypeError, "clip"),
        ({"sampler": [1]}, TypeError, "must be a CustomSampler"),
        ({"replica": "cpu"}, TypeError, "replica must be an xla_replica"),
        ({"optimizer": 3}, TypeError, "must be a torch.optim.Opt"),
        ({"replica": LocalReplica("meta")}, ValueError, "is on cpu, but this is repl"),
    ],
)
def test_bad_arguments(options, error, message):
    _, sampler, _ = make()
    arguments = {"optimizer": SGD([parameter()], 0.1), "sampler": sampler}
    arguments |= {"replica": CPU, "ref_batchsize": 32}
    with pytest.raises(error, match=message):
        vbs.ElasticOptimizer(**(arguments | options))


@pytest.mark.parametrize(
    ("inner", "rule", "message"),
    [
        (torch.optim.LBFGS, "linear", "LBFGS evaluates the loss inside"),
        (torch.optim.SparseAdam, "linear", "SparseAdam takes sparse gradients alone"),
        (lambda ps: torch.optim.Optimizer(ps, {}), "linear", "group .* has no 'lr'"),
        (AdamW, "linear-momentum", "which only SGD turns into a scaled step"),
        (lambda ps: SGD(ps, torch.tensor(0.1)), "linear", "be a number, not a tensor"),
        (lambda ps: SGD(ps, 0.1, NAN), "linear", "momentum must be a number, got nan"),
        (lambda ps: SGD(ps, 0.1, 0, 0, NAN), "linear", "weight_decay must .*, got nan"),
        (lambda ps: make()[2], "root", "a LinearRuleOptimizer, which is a wrapper"),
    ],
)
def test_optimizers_that_cannot_be_wrapped(inner, rule, message):
    _, sampler, _ = make()
    with pytest.raises((TypeError, ValueError), match=message):
        vbs.ElasticOptimizer(inner([parameter()]), sampler, rule, 32, replica=CPU)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("value", [NAN, INF, -0.1, "0.1", torch.tensor(0.1), None])
def test_a_learning_rate_is_a_finite_number(value):
    """torch's SGD takes NaN, after which every weight is NaN, and later anything."""
    model, sampler, optimizer = make()
    if value in (NAN, INF):
        told = f"reference learning rate must .*got {value}"
        with pytest.raises(ValueError, match=told):
            vbs.LinearRuleOptimizer(SGD(model.parameters(), value), sampler, 32)
    optimizer.param_groups[0]["lr"] = value  # as an attached function might
    told = r"parameter group 0 has become .*must be a finite number"
    with pytest.raises(ValueError, match=told):
        run_epoch(model, sampler, optimizer)
    assert not any(parameter.any() for parameter in model.parameters())
    with pytest.raises((TypeError, ValueError), match="set_lr: the learning rate must"):
        optimizer.set_lr((value,))


def test_sampler_and_replica_must_agree():
    model, sampler, _ = make(rank=1, replicas=4)
    inner = SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="deals to replica 1 of 4, but this is repl"):
        vbs.LinearRuleOptimizer(inner, sampler, 32, replica=CPU)


def test_a_group_that_is_refused_is_not_added():
    _, _, wrapper = make()
    with pytest.raises(TypeError, match="must be a number, not a tensor"):
        wrapper.add_param_group(
            {"params": nn.Parameter(torch.ones(1)), "lr": torch.tensor(0.1)}
        )
    assert len(wrapper.param_groups) == 1


def test_calls_with_wrong_arguments():
    _, _, wrapper = make()
    with pytest.raises(ValueError, match="one learning rate for each of 1 parameter"):
        wrapper.set_lr((0.1, 0.2))
    with pytest.raises(ValueError, match=r"needs a tuple with one .* got 0.1"):
        wrapper.set_lr(0.1)
    with pytest.raises(TypeError, match=r"call loss.backward\(\) before step\(\)"):
        wrapper.step(lambda: None)


def test_a_scaler_of_gradients_is_refused():
    model, _, wrapper = make()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    for prepare in (lambda: None, lambda: scaler.unscale_(wrapper)):
        prepare()
        with pytest.raises(TypeError, match="GradScaler is not supported"):
            scaler.step(wrapper)


# --- going round the wrapper --------------------------------------------------------


def test_a_step_of_the_inner_optimizer_is_an_error():
    model, _, wrapper = make()
    backward(model)
    with pytest.raises(RuntimeError, match=r"SGD that a LinearRuleOptimizer wraps was"):
        wrapper.inner.step()
    assert torch.equal(model.weight, torch.zeros(1, 2))
    assert wrapper.step() == 0
    backward(model)
    assert wrapper.step() == 1  # which steps the inner one
    with pytest.raises(RuntimeError, match=r"Call step\(\) of the wrapper instead"):
        wrapper.inner.step()


def test_an_inner_optimizer_may_be_wrapped_again_or_used_alone_later():
    """Wrappers that are dropped are gone at once, without a collection."""
    model, sampler, wrapper = make(trace=32)
    inner = wrapper.inner
    again = vbs.ConstantOptimizer(inner, sampler, replica=CPU)
    backward(model)
    assert again.step() == 1
    with pytest.raises(RuntimeError, match="that a ConstantOptimizer wraps"):
        inner.step()
    gone = [weakref.ref(wrapper), weakref.ref(again)]
    gc.disable()
    try:
        del wrapper, again
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()
    inner.step()


def with_data():
    """Returns a dataset, and a model, a sampler and a wrapper for it."""
    dataset, model = TensorDataset(torch.ones(256, 2)), nn.Linear(2, 1)
    sampler = vbs.CustomSampler(dataset, 32, num_replicas=1, rank=0, verbose=False)
    inner = SGD(model.parameters(), 0.1)
    return dataset, model, sampler, vbs.ConstantOptimizer(inner, sampler, replica=CPU)


def test_a_loader_without_the_sampler_is_an_error():
    """Its batches are as many as the trace needs, so that nothing else would notice."""
    dataset, model, _, wrapper = with_data()
    (x,) = next(iter(DataLoader(dataset, batch_size=32)))
    model(x).mean().backward()
    with pytest.raises(ValueError, match=r"batch_sampler=sampler\), or iterate"):
        wrapper.step()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_may_read_ahead_and_be_abandoned(num_workers):
    dataset, model, sampler, wrapper = with_data()
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
    next(iter(loader))  # a look at the data
    for (x,) in loader:
        model(x).mean().backward()
        assert wrapper.step() == 1
    assert 8 < sampler.num_yielded <= 16


# --- what is saved --------------------------------------------------------------------


@pytest.mark.parametrize("left_after", [1, 2, 3])
def test_a_new_loop_amid_an_epoch_is_an_error(left_after):
    """It would deal the first steps again, and the last ones never."""
    model, sampler, wrapper = make()
    next(iter(sampler))  # a look, before training
    for number, _ in enumerate(sampler, 1):
        backward(model)
        wrapper.step()
        if number == left_after:
            break
    next(iter(sampler))
    backward(model)
    with pytest.raises(ValueError, match="a new loop over the sampler began after"):
        wrapper.step()
    model.zero_grad()
    sampler.set_epoch(0)
    wrapper.set_epoch(0)
    assert run_epoch(model, sampler, wrapper) == [0, 1, 0, 0, 1, 0, 0, 1]


def test_a_load_amid_a_loop_needs_a_new_one():
    model, sampler, wrapper = make()
    state, minibatches = wrapper.state_dict(), iter(sampler)
    for _ in range(2):
        next(minibatches)
        backward(model)
        wrapper.step()
    wrapper.load_state_dict(state)
    next(minibatches)
    backward(model)
    with pytest.raises(ValueError, match="begin a new loop"):
        wrapper.step()
    model.zero_grad()
    assert run_epoch(model, sampler, wrapper) == [0, 1, 0, 0, 1, 0, 0, 1]


def test_state_dict_hooks_run():
    _, _, wrapper = make()
    calls = []
    wrapper.register_state_dict_pre_hook(lambda o: calls.append("save"))
    wrapper.register_state_dict_post_hook(lambda o, state: calls.append("saved"))
    wrapper.register_load_state_dict_pre_hook(lambda o, state: calls.append("load"))
    wrapper.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    wrapper.load_state_dict(wrapper.state_dict())
    assert calls == ["save", "saved", "load", "loaded"]


def test_a_copy_is_refused():
    _, _, wrapper = make()
    with pytest.raises(TypeError, match=r"save optimizer.state_dict\(\) instead"):
        copy.deepcopy(wrapper)


def test_a_state_of_another_reference_is_refused():
    _, optimizer = noise.make(ref_batchsize=2)
    _, other = noise.make(ref_batchsize=1)
    with pytest.raises(ValueError, match="ref_batchsize was 2 and is 1"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="counts steps of 2 samples, and this opt"):
        other.load_state_dict(optimizer.state_dict(), allow_changes=True)


def test_a_state_of_another_rule_is_refused():
    _, linear = noise.make(cls=vbs.LinearRuleOptimizer)
    _, optimizer = noise.make()
    with pytest.raises(ValueError, match="of rule 'linear', and this optimizer has 'a"):
        optimizer.load_state_dict(linear.state_dict())
