"""Gradients that stay allocated: zeroed, frozen, added and thrown away by users."""

from __future__ import annotations

import pytest
import torch
from support.wrapping import CPU, backward, idle_replica, make, run_epoch
from torch import nn
from torch.optim import SGD

import variable_batch_size as vbs


def test_gradients_keep_their_memory():
    model, sampler, wrapper = make()
    before = [p.grad.data_ptr() for p in model.parameters()]
    run_epoch(model, sampler, wrapper)
    assert [p.grad.data_ptr() for p in model.parameters()] == before


def test_gradients_from_before_the_wrapper_do_not_count():
    model, sampler, _ = make(trace=32)
    backward(model)  # a learning-rate finder's, say
    wrapper = vbs.ConstantOptimizer(SGD(model.parameters(), 0.1), sampler, replica=CPU)
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))
    assert wrapper.get_lr() == (0.1,)


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


def test_a_group_added_to_the_inner_optimizer_is_an_error():
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
    """It does so even if model.zero_grad() has put None in their place."""
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
