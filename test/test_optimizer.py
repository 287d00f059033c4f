"""The optimizer wrappers on one replica; on several see test_elastic_family.py."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

import variable_batch_size as vbs
from xla_replica import LocalReplica, ReplicaError

CPU = LocalReplica("cpu")


class FakeReplica(LocalReplica):
    """Replica ``rank`` of several, whose peers bring what it brings."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        super().__init__("cpu")
        self.rank, self.num_replicas = rank, num_replicas

    def sum_(self, tensors) -> None:
        for tensor in tensors:
            tensor.mul_(self.num_replicas)


def make(
    trace=(64, 96, 96), inner=SGD, cls=vbs.LinearRuleOptimizer, rank=0, replicas=1,
    lr=0.1, **options,
):  # fmt: skip
    """(model, sampler, wrapper) over 256 samples in minibatches of 32."""
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    sampler = vbs.CustomSampler(
        range(256), trace, num_replicas=replicas, rank=rank, verbose=False
    )
    replica = FakeReplica(rank, replicas)
    options = {"ref_batchsize": 32, "replica": replica} | options
    wrapper = cls(inner(model.parameters(), lr), sampler, **options)
    return model, sampler, wrapper


def backward(model: nn.Module) -> None:
    """A minibatch whose gradient is one everywhere."""
    model(torch.ones(1, 2)).sum().backward()


def run_epoch(model, sampler, wrapper) -> list[int]:
    returned = []
    for _ in sampler:
        backward(model)
        returned.append(wrapper.step())
    return returned


def test_step_says_whether_it_updated():
    """Trace 64, 96, 96 in minibatches of 32: accumulate, update, accumulate, ..."""
    assert run_epoch(*make()) == [0, 1, 0, 0, 1, 0, 0, 1]


def test_gradients_are_averaged_and_the_learning_rate_scaled():
    model, sampler, wrapper = make(trace=[64])
    run_epoch(model, sampler, wrapper)
    assert torch.equal(model.weight.data, torch.full((1, 2), -0.1 * 2 * 1.0))
    assert wrapper.get_lr() == (0.1,)
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))


def test_gradients_keep_their_memory():
    model, sampler, wrapper = make()
    before = [p.grad.data_ptr() for p in model.parameters()]
    run_epoch(model, sampler, wrapper)
    assert [p.grad.data_ptr() for p in model.parameters()] == before


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


# --- schedulers ---------------------------------------------------------------------


@pytest.mark.parametrize("on_inner", [False, True])
def test_a_scheduler_sees_the_reference_learning_rate(on_inner):
    model, sampler, wrapper = make()
    scheduler = StepLR(wrapper.inner if on_inner else wrapper, 1, gamma=0.5)
    used = []
    wrapper.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
    for _ in sampler:
        backward(model)
        if wrapper.step():
            scheduler.step()
    assert used == pytest.approx([0.2, 0.3 / 2, 0.3 / 4])
    assert scheduler.get_last_lr() == [*wrapper.get_lr()] == pytest.approx([0.1 / 8])


def test_one_cycle_on_the_wrapper():
    model, sampler, wrapper = make(
        inner=lambda ps, lr: SGD(ps, lr, momentum=0.9), trace=32
    )
    scheduler = OneCycleLR(wrapper, max_lr=1.0, total_steps=8)
    lrs = []
    wrapper.attach(lambda update: lrs.append(update.lr[0]))
    wrapper.attach(scheduler)
    for _, _ in zip(range(7), sampler):
        backward(model)
        wrapper.step()
    assert lrs[0] == pytest.approx(1.0 / 25)
    assert max(lrs) == pytest.approx(1.0, rel=0.1)


def idle_replica(**options):
    """Replica 1 of 2: idle in steps 0, 2, 3 and 5 of its first epoch."""
    return make(trace=[32, 64, 32, 32, 64, 32], rank=1, replicas=2, **options)


def test_idle_steps_are_joined():
    model, sampler, wrapper = idle_replica()
    assert len(sampler) == 2
    assert wrapper.set_epoch(0) == 1
    assert run_epoch(model, sampler, wrapper) == [3, 2]


def test_an_attached_scheduler_sees_every_update_on_an_idle_replica():
    histories = []
    for rank in (0, 1):
        model, sampler, wrapper = make(
            trace=[32, 64, 32, 32, 64, 32], rank=rank, replicas=2
        )
        updates = []
        wrapper.attach(updates.append)
        wrapper.attach(LambdaLR(wrapper, lambda n: 1 / (n + 1)))
        wrapper.set_epoch(0)
        run_epoch(model, sampler, wrapper)
        histories.append([(u.epoch, u.step, u.batch_size, u.lr) for u in updates])
        idle = [u.idle for u in updates]
        assert idle == ([False] * 6, [True, False, True, True, False, True])[rank]
    assert histories[0] == histories[1]
    assert [lr for *_, (lr,) in histories[0]] == pytest.approx(
        [0.1, 0.1, 0.1 / 3, 0.1 / 4, 0.2 / 5, 0.1 / 6]
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scheduler_that_would_diverge_is_an_error_on_every_replica(rank):
    """Stepped by hand it would miss the joined updates; so it never gets that far."""
    model, sampler, wrapper = make(
        trace=[32, 64, 32, 32, 64, 32], rank=rank, replicas=2
    )
    scheduler = StepLR(wrapper, 1)
    wrapper.set_epoch(0)

    def stepped_by_hand() -> None:
        for _ in sampler:
            backward(model)
            if wrapper.step():
                scheduler.step()

    with pytest.raises(ReplicaError, match=r"call optimizer.attach\(scheduler\)"):
        stepped_by_hand()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scheduler_stepped_per_minibatch_is_an_error_on_several_replicas(rank):
    """Nobody idles, but replica 0 runs two minibatches and replica 1 one."""
    model, sampler, wrapper = make(trace=96, rank=rank, replicas=2)
    scheduler = StepLR(wrapper, 1)

    def stepped_every_time() -> None:
        for _ in sampler:
            backward(model)
            wrapper.step()
            scheduler.step()

    if rank == 0:
        with pytest.raises(ReplicaError, match="changed within step 0 of epoch 0"):
            stepped_every_time()
    else:
        stepped_every_time()  # its own view is consistent; replica 0 ends the run


def test_a_change_behind_set_epoch_is_an_error_where_replicas_have_joined():
    model, _sampler, wrapper = make(trace=[32, 64, 32], replicas=2)
    wrapper.set_epoch(0)
    wrapper.set_lr((0.5,))  # replica 1 has done step 0 with 0.1
    backward(model)
    with pytest.raises(ReplicaError, match=r"before optimizer.set_epoch"):
        wrapper.step()


def test_a_scheduler_stepped_in_a_step_hook_is_an_error():
    model, _sampler, wrapper = make(trace=[32, 32])
    scheduler = StepLR(wrapper.inner, 1)
    wrapper.register_step_post_hook(lambda *_: scheduler.step())
    backward(model)
    with pytest.raises(ValueError, match=r"use optimizer.attach"):
        wrapper.step()
    assert wrapper.get_lr() == (0.1,)


def test_between_epochs_the_learning_rate_may_change():
    model, sampler, wrapper = idle_replica()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        wrapper.set_epoch(epoch)
        run_epoch(model, sampler, wrapper)
        wrapper.set_lr((0.01,))


def test_attach_takes_schedulers_and_functions_only():
    _, _, wrapper = make()
    with pytest.raises(TypeError, match="needs a metric"):
        wrapper.attach(ReduceLROnPlateau(wrapper))
    with pytest.raises(TypeError, match="neither an LR scheduler nor a function"):
        wrapper.attach(3)


# --- epochs -------------------------------------------------------------------------


def test_epochs_follow_the_sampler():
    """A forgotten optimizer.set_epoch is harmless where nobody idles at first."""
    model, sampler, wrapper = make(trace=128)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sum(run_epoch(model, sampler, wrapper)) == 2
        assert wrapper.epoch == epoch


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forgotten_set_epoch_is_an_error_where_idle_replicas_need_it(rank):
    model, _, wrapper = make(trace=[32, 64], rank=rank, replicas=2)
    backward(model)
    with pytest.raises(ReplicaError, match=r"call optimizer.set_epoch\(0\) before"):
        wrapper.step()


def test_stepping_past_the_epoch_is_an_error():
    model, sampler, wrapper = make()
    run_epoch(model, sampler, wrapper)
    with pytest.raises(ValueError, match=r"after the last of the 3 steps of epoch 0"):
        wrapper.step()


def test_sampler_and_optimizer_at_different_epochs_are_an_error():
    model, _, wrapper = make(trace=128)
    wrapper.set_epoch(1)
    backward(model)
    with pytest.raises(ValueError, match=r"at step 0 of epoch 1 and the sampler at ep"):
        wrapper.step()


def test_an_abandoned_epoch_warns_and_loses_its_gradients(caplog):
    model, sampler, wrapper = make()
    backward(model)
    wrapper.step()
    wrapper.set_epoch(0)
    assert "epoch 0 is abandoned after 0 of 3 steps" in caplog.text
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))
    assert run_epoch(model, sampler, wrapper) == [0, 1, 0, 0, 1, 0, 0, 1]


def test_an_abandoned_epoch_is_an_error_on_several_replicas():
    model, _, wrapper = make(trace=128, replicas=2)
    wrapper.set_epoch(0)
    backward(model)
    wrapper.step()
    with pytest.raises(
        ReplicaError, match=r"abandoned after 0 of 2 steps, and the oth"
    ):
        wrapper.set_epoch(1)


def test_set_epoch_twice_joins_idle_steps_once():
    model, sampler, wrapper = idle_replica()
    assert [wrapper.set_epoch(0), wrapper.set_epoch(0)] == [1, 0]
    assert run_epoch(model, sampler, wrapper) == [3, 2]


def test_an_epoch_number_is_trained_once_on_several_replicas():
    model, sampler, wrapper = make(trace=128, replicas=2)
    wrapper.set_epoch(0)
    run_epoch(model, sampler, wrapper)
    with pytest.raises(ReplicaError, match="epoch 0 has been trained; another pass"):
        wrapper.set_epoch(0)


def test_gradients_from_before_the_wrapper_do_not_count():
    model, sampler, _ = make(trace=32)
    backward(model)  # a learning-rate finder's, say
    wrapper = vbs.ConstantOptimizer(SGD(model.parameters(), 0.1), sampler, replica=CPU)
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))
    assert wrapper.get_lr() == (0.1,)


def test_set_epoch_behind_the_trace():
    _, sampler, wrapper = make()
    sampler.set_epoch(7)
    assert wrapper.set_epoch(7) == 0
    assert wrapper.get_bs() == 0


# --- gradients ----------------------------------------------------------------------


def test_model_zero_grad_before_a_step_is_harmless():
    model, sampler, wrapper = make(trace=[32, 32])
    expected, other, plain = make(trace=[32, 32])
    for _, _ in zip(sampler, other):
        model.zero_grad()
        backward(model)
        wrapper.step()
        backward(expected)
        plain.step()
    assert torch.equal(model.weight, expected.weight)


def test_model_zero_grad_within_a_step_is_an_error():
    model, _, wrapper = make()
    backward(model)
    wrapper.step()
    model.zero_grad()
    backward(model)
    with pytest.raises(ValueError, match=r"remove model.zero_grad\(\)"):
        wrapper.step()


def test_a_parameter_outside_the_loss_takes_part_with_zero():
    model, sampler, _ = make()
    unused = nn.Parameter(torch.ones(3))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    inner = SGD([*model.parameters(), unused, frozen], 0.1)
    wrapper = vbs.LinearRuleOptimizer(inner, sampler, 32, replica=CPU)
    run_epoch(model, sampler, wrapper)
    assert torch.equal(unused.data, torch.ones(3))
    assert frozen.grad is None


def test_a_group_added_later_is_trained_too():
    model, sampler, wrapper = make(trace=[64])
    late = nn.Parameter(torch.zeros(2))
    wrapper.add_param_group({"params": [late], "lr": 1.0})
    for _ in sampler:
        (model(torch.ones(1, 2)).sum() + late.sum()).backward()
        wrapper.step()
    assert torch.equal(late.data, torch.full((2,), -2.0))
    assert wrapper.get_lr() == (0.1, 1.0)


def test_a_group_added_behind_the_wrapper_is_an_error():
    model, _, wrapper = make()
    wrapper.inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    backward(model)
    with pytest.raises(ValueError, match="through the wrapper's add_param_group"):
        wrapper.step()


def test_freezing_and_unfreezing():
    """A frozen parameter stays, whatever its momentum; an unfrozen one is averaged."""
    model, sampler, wrapper = make(
        trace=64, inner=lambda ps, lr: SGD(ps, lr, momentum=0.9, weight_decay=0.1)
    )
    run_epoch(model, sampler, wrapper)
    model.bias.requires_grad_(False)
    frozen = model.bias.detach().clone()
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        run_epoch(model, sampler, wrapper)
    assert torch.equal(model.bias, frozen)
    assert model.bias.grad is None
    model.bias.requires_grad_(True)
    gradients = []
    wrapper.register_step_pre_hook(lambda *_: gradients.append(model.bias.grad.item()))
    sampler.set_epoch(3)
    run_epoch(model, sampler, wrapper)
    assert gradients == [1.0] * 4


def test_an_idle_replica_joins_with_its_kept_gradients():
    """Even if model.zero_grad() has put None in their place."""
    model, _sampler, wrapper = idle_replica()
    before = model.weight.grad
    model.zero_grad()
    wrapper.set_epoch(0)
    assert model.weight.grad is before


@pytest.mark.parametrize("rule", [vbs.LinearRuleOptimizer, vbs.RootRuleOptimizer])
def test_parameters_without_dimensions(rule):
    scale = nn.Parameter(torch.tensor(1.0))
    sampler = vbs.CustomSampler(range(64), 64, num_replicas=1, rank=0, verbose=False)
    wrapper = rule(SGD([scale], 0.25), sampler, 64, replica=CPU)
    for _ in sampler:
        (scale * 2).backward()
        wrapper.step()
    assert scale.item() == 0.5


def test_clipping_happens_after_the_average():
    model, sampler, wrapper = make(trace=[64], lr=1.0, max_grad_norm=0.5)
    run_epoch(model, sampler, wrapper)
    moved = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert moved.norm() == pytest.approx(2 * 0.5, rel=1e-4)


# --- hooks, exceptions, state -------------------------------------------------------


def test_step_hooks_run_once_an_update_around_the_inner_step():
    model, sampler, wrapper = make()
    events = []
    wrapper.register_step_pre_hook(
        lambda o, *_: events.append(("pre", float(model.weight.grad[0, 0])))
    )
    wrapper.register_step_post_hook(lambda o, *_: events.append(("post", None)))
    run_epoch(model, sampler, wrapper)
    assert events == [("pre", 1.0), ("post", None)] * 3  # the mean, not the sum


def test_global_step_hooks_run_once_an_update():
    from torch.optim.optimizer import register_optimizer_step_post_hook

    model, sampler, wrapper = make()
    calls = []
    handle = register_optimizer_step_post_hook(lambda o, *_: calls.append(o))
    try:
        run_epoch(model, sampler, wrapper)
    finally:
        handle.remove()
    assert calls == [wrapper.inner] * 3


def test_an_exception_in_the_update_restores_the_learning_rate():
    model, sampler, wrapper = make(cls=vbs.LinearRuleMomentumOptimizer)
    wrapper.param_groups[0]["weight_decay"] = 0.25

    def fail(optimizer, *_):
        raise ArithmeticError("diverged")

    wrapper.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="diverged"):
        run_epoch(model, sampler, wrapper)
    assert wrapper.get_lr() == (0.1,)
    assert wrapper.param_groups[0]["weight_decay"] == 0.25


def test_after_an_exception_training_can_go_on():
    model, sampler, wrapper = make()
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
    assert returned == [0, "lost", 0, 0, 1, 0, 0, 1]
    assert torch.equal(model.weight.data, torch.full((1, 2), -0.3 * 2))


def test_an_exception_before_an_idle_step_ends_training():
    """The step was not joined, so there is no way on; it says so instead of hanging."""
    model, _sampler, wrapper = idle_replica()
    wrapper.set_epoch(0)

    def fail(update):
        raise ArithmeticError("in a callback")

    wrapper.attach(fail)
    backward(model)
    with pytest.raises(ArithmeticError):
        wrapper.step()
    backward(model)
    with pytest.raises(ReplicaError, match="replica 1 is idle in step 2 of"):
        wrapper.step()


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
    import copy

    _, _, wrapper = make()
    with pytest.raises(TypeError, match=r"save optimizer.state_dict\(\) instead"):
        copy.deepcopy(wrapper)


def test_state_goes_to_and_from_the_inner_optimizer(tmp_path):
    model, sampler, wrapper = make(inner=AdamW, cls=vbs.RootRuleOptimizer)
    run_epoch(model, sampler, wrapper)
    torch.save(wrapper.state_dict(), tmp_path / "optimizer.pt")
    _, _, other = make(inner=AdamW, cls=vbs.RootRuleOptimizer)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    saved, loaded = wrapper.state_dict(), other.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    for key, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(loaded["state"][key][name], value)
    assert other.param_groups is other.inner.param_groups


def test_a_closure_is_refused():
    _, _, wrapper = make()
    with pytest.raises(TypeError, match=r"call loss.backward\(\) before step\(\)"):
        wrapper.step(lambda: None)


def test_log_steps(caplog):
    model, sampler, wrapper = make(log_steps=2)
    with caplog.at_level(logging.INFO):
        run_epoch(model, sampler, wrapper)
    assert [r.message for r in caplog.records] == [
        "step 0: batch size 64, learning rate 0.2",
        "step 2: batch size 96, learning rate 0.3",
    ]


# --- the rules as optimizers --------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_linear_momentum_keeps_the_factor_in_the_buffer(maximize, nesterov):
    """v = m v + (B/ref) (mean gradient + wd w); w -= lr v, in float64 by hand."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, dtype=torch.float64))
    w, v = weight.detach().clone(), torch.zeros(5, dtype=torch.float64)
    sampler = vbs.CustomSampler(
        range(256), [64, 32, 96, 64], num_replicas=1, rank=0, verbose=False
    )
    inner = SGD(
        [weight], 0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov,
        maximize=maximize,
    )  # fmt: skip
    wrapper = vbs.LinearRuleMomentumOptimizer(inner, sampler, 64, replica=CPU)
    for n in sampler.plan.num_minibatches:
        gradients = torch.randn(n, 5, dtype=torch.float64)
        for gradient in gradients:
            weight.grad.add_(gradient)
            wrapper.step()
        g = gradients.mean(0) * (-1 if maximize else 1) + 0.01 * w
        g = g * (32 * n / 64)
        v = 0.9 * v + g
        w = w - 0.1 * (g + 0.9 * v if nesterov else v)
    torch.testing.assert_close(weight.detach(), w, rtol=1e-13, atol=1e-13)
    assert inner.param_groups[0]["weight_decay"] == 0.01
    assert wrapper.current_lr() == pytest.approx(0.1 * 64 / 64)


def test_linear_momentum_takes_a_weight_decay_for_all_groups():
    _, _, wrapper = make(cls=vbs.LinearRuleMomentumOptimizer, weight_decay=0.5)
    assert wrapper.param_groups[0]["weight_decay"] == 0.5
    with pytest.raises(ValueError, match="weight_decay must be >= 0"):
        make(cls=vbs.LinearRuleMomentumOptimizer, weight_decay=-1)


def test_constant_needs_no_reference():
    model, sampler, _ = make(trace=[64])
    inner = SGD(model.parameters(), 0.1)
    wrapper = vbs.ConstantOptimizer(inner, sampler, replica=CPU)
    run_epoch(model, sampler, wrapper)
    assert torch.equal(model.weight.data, torch.full((1, 2), -0.1))


# --- arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "lars"}, ValueError, "rule='lars' is unknown"),
        ({}, TypeError, "rule 'linear' needs ref_batchsize="),
        ({"ref_batchsize": 0}, ValueError, "ref_batchsize must be > 0, got 0"),
        ({"ref_batchsize": 32, "log_steps": -1}, ValueError, "log_steps must be > 0"),
        ({"ref_batchsize": 32, "max_grad_norm": 0.0}, ValueError, "max_grad_norm must"),
        ({"ref_batchsize": 32, "clip": 1}, TypeError, "clip"),
        ({"ref_batchsize": 32, "sampler": [1]}, TypeError, "must be a CustomSampler"),
        ({"ref_batchsize": 32, "optimizer": 3}, TypeError, "must be a torch.optim.Opt"),
    ],
)
def test_bad_arguments(options, error, message):
    model, sampler, _ = make()
    arguments = {
        "optimizer": SGD(model.parameters(), 0.1),
        "sampler": sampler,
        "replica": CPU,
    }
    with pytest.raises(error, match=message):
        vbs.ElasticOptimizer(**(arguments | options))


def test_optimizers_that_cannot_be_wrapped():
    model, sampler, _ = make()
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(TypeError, match="LBFGS evaluates the loss inside"):
        vbs.LinearRuleOptimizer(lbfgs, sampler, 32, replica=CPU)
    adam = AdamW(model.parameters())
    with pytest.raises(TypeError, match="which only SGD turns into a scaled step"):
        vbs.LinearRuleMomentumOptimizer(adam, sampler, 32, replica=CPU)
    tensor = SGD(model.parameters(), torch.tensor(0.1))
    with pytest.raises(TypeError, match="must be a number, not a tensor"):
        vbs.LinearRuleOptimizer(tensor, sampler, 32, replica=CPU)


def test_sampler_and_replica_must_agree():
    model, sampler, _ = make(rank=1, replicas=4)
    inner = SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="deals to replica 1 of 4, but this is repl"):
        vbs.LinearRuleOptimizer(inner, sampler, 32, replica=CPU)


def test_the_model_must_be_on_the_replicas_device():
    model, sampler, _ = make()
    inner = SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"a parameter is on cpu, but this is replica"):
        vbs.LinearRuleOptimizer(inner, sampler, 32, replica=LocalReplica("meta"))


def test_numbers_are_uploaded_once_and_never_shared_between_uses():
    from variable_batch_size.numbers import Numbers

    numbers = Numbers(CPU, capacity=3)
    first = numbers.get("lr", 0.5)
    assert first.shape == (1,)
    assert numbers.get("lr", 0.5) is first
    assert numbers.get("divisor", 0.5) is not first  # one tensor would be another graph
    assert numbers.get("lr", 0.5, torch.float64).dtype == torch.float64
    numbers.get("lr", 0.25)
    assert numbers.get("lr", 0.5) is not first  # the oldest made room


def test_a_scaler_of_gradients_is_refused():
    model, _, wrapper = make()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    for prepare in (lambda: None, lambda: scaler.unscale_(wrapper)):
        prepare()
        with pytest.raises(TypeError, match="GradScaler is not supported"):
            scaler.step(wrapper)


def test_a_group_that_is_refused_is_not_added():
    _, _, wrapper = make()
    with pytest.raises(TypeError, match="must be a number, not a tensor"):
        wrapper.add_param_group(
            {"params": nn.Parameter(torch.ones(1)), "lr": torch.tensor(0.1)}
        )
    assert len(wrapper.param_groups) == 1


@pytest.mark.parametrize("factor", [-1.0, float("nan"), None])
def test_a_rule_without_a_factor_is_refused_at_once(factor):
    with pytest.raises(ValueError, match=r"rule 'mine' makes the factor .* finite"):
        make(cls=vbs.ElasticOptimizer, rule=vbs.Rule("mine", lambda ratio: factor))


def test_learning_rates_for_every_group():
    _, _, wrapper = make()
    with pytest.raises(ValueError, match="one learning rate for each of 1 parameter"):
        wrapper.set_lr((0.1, 0.2))


@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_a_rule_that_suits_another_optimizer_warns(rule):
    with pytest.warns(UserWarning, match=f"'{rule}' is derived for SGD.*for AdamW"):
        make(inner=AdamW, cls=vbs.ElasticOptimizer, rule=rule)


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        (SGD, {"rule": "adam-root"}, "needs torch's Adam or AdamW, got SGD"),
        (torch.optim.RAdam, {"rule": "adam-half-life"}, "Adam or AdamW, got RAdam"),
        (AdamW, {"rule": "root", "momentum_correction": True}, "only SGD turns into"),
        (
            torch.optim.Adam,
            {"rule": "root", "decay_per_sample": True},
            "decay_per_sample needs weight decay that multiplies the weights",
        ),
        (
            lambda ps, lr: AdamW(ps, lr, capturable=True),
            {"rule": "adam-root"},
            "does not work with capturable=True",
        ),
    ],
)
def test_a_rule_that_does_not_work_with_the_optimizer_is_refused(
    inner, options, message
):
    with pytest.raises(TypeError, match=message):
        make(inner=inner, cls=vbs.ElasticOptimizer, **options)
