"""What stays sparse in a training loop with RigLScheduler, what moves, and when."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from support.rigl_xla import sparse
from torch import nn


@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("kind", sparse.OPTIMIZERS)
def test_every_optimizer_keeps_inactive_weights_and_their_state_at_zero(
    kind, skip_step
):
    """Steps 3, 6, 9 and 12 move connections, and other weights if not skipped."""
    model, optimizer, pruner = sparse.sparse_convnet(kind, skip_step=skip_step)
    active = sparse.counts(pruner)
    assert active == [231, 820, 32]  # 1152 - floor(0.8 * 1152), ...
    for step in range(15):
        masks, before = copy.deepcopy([pruner.masks, model.state_dict()])
        sparse.train(model, optimizer, pruner, range(step, step + 1))
        is_update = step + 1 in (3, 6, 9, 12)
        for name, mask in pruner.masks.items():  # where they stay, weights do, too
            before[name] = torch.where(mask & masks[name], before[name], 0.0)
        same = sparse.equal(model.state_dict(), before)
        assert same == (is_update and skip_step)
        assert sparse.equal(pruner.masks, masks) != is_update
        assert sparse.counts(pruner) == active
        assert sparse.inactive_are_zero(pruner)
    assert (pruner.step, pruner.rigl_steps) == (15, 4)


@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("kind", sorted(set(sparse.OPTIMIZERS) - {"sgd-plain"}))
def test_a_grown_connection_begins_without_the_optimizers_past(kind, skip_step):
    """That holds where there was optimizer state, as in a loaded state."""
    options = {"skip_step": skip_step, "bound_new_steps": False}
    model, optimizer, pruner = sparse.sparse_convnet(kind, **options)
    sparse.train(model, optimizer, pruner, range(2))
    masks = copy.deepcopy(pruner.masks)
    kept_of = {n: sparse.kept_of(model.get_parameter(n), optimizer) for n in masks}
    for tensor in itertools.chain(*kept_of.values()):
        tensor.fill_(1.0)
    sparse.train(model, optimizer, pruner, range(2, 3))
    for name, new in pruner.masks.items():
        grown, kept = new & ~masks[name], new & masks[name]
        assert grown.any()
        assert kept_of[name]
        for tensor in kept_of[name]:
            assert not tensor[grown].any()
            assert tensor[kept].all()


def after_an_update(optimizer_of):
    """Yields of every layer the optimizer's state, who grew, who stayed, gradients."""
    model = sparse.convnet()
    optimizer = optimizer_of(model.parameters())
    pruner = sparse.pruned(model, optimizer)
    sparse.train(model, optimizer, pruner, range(2))
    masks, twin = copy.deepcopy(pruner.masks), copy.deepcopy(model)
    sparse.train(model, optimizer, pruner, range(2, 3))
    twin.zero_grad()
    sparse.backward(twin, 2)
    for name, new in pruner.masks.items():
        state, old = optimizer.state[model.get_parameter(name)], masks[name]
        yield state, new & ~old, new & old, twin.get_parameter(name).grad


@pytest.mark.parametrize("kind", ["adamw", "nadam"])
def test_new_connections_move_no_further_under_adam_than_nine_in_ten_others(kind):
    """Their second moments make as large a step while their gradient is that one."""
    for state, grown, kept, gradient in after_an_update(sparse.OPTIMIZERS[kind]):
        moments = state["exp_avg_sq"]
        steps = (state["exp_avg"][kept].abs() / moments[kept].sqrt()).nan_to_num()
        furthest = steps.sort(descending=True).values[max(len(steps) // 10, 1) - 1]
        expected = (gradient / furthest).square().clamp(min=moments[kept].mean())
        torch.testing.assert_close(moments[grown], expected[grown])


def test_the_rates_of_rprop_begin_at_their_initial_value():
    for state, grown, kept, _ in after_an_update(lambda p: torch.optim.Rprop(p, 0.01)):
        assert state["step_size"][grown].unique().tolist() == pytest.approx([0.01])
        assert not state["step_size"][~(grown | kept)].any()


def test_a_layer_outside_of_the_loss_keeps_its_mask():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
    pruner = sparse.pruned(model, delta=1)
    masks = copy.deepcopy(pruner.masks)
    for _ in range(3):
        model.zero_grad()
        model[1](model[0](torch.randn(4, 8))).square().sum().backward()
        pruner()
    assert not torch.equal(masks["1.weight"], pruner.masks["1.weight"])
    assert torch.equal(masks["2.weight"], pruner.masks["2.weight"])


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_the_gradient_is_sparse_before_anyone_clips_it(factor):
    model, _, pruner = sparse.sparse_convnet(delta=2, grad_accumulation_n=2)
    for step in range(4):
        model.zero_grad()
        sparse.backward(model, step, factor)
        for name, mask in pruner.masks.items():
            grad = model.get_parameter(name).grad
            assert not grad[~mask].any()
            assert grad[mask].isnan().all() == (factor != 1)
        pruner()


def test_single_call_mode_needs_no_call_and_takes_closures():
    weights = []
    for with_closure in (False, True):
        model, optimizer, pruner = sparse.sparse_convnet(skip_step=False)
        for step in range(10):
            optimizer.zero_grad()
            closure = functools.partial(sparse.backward, model, step)
            if not with_closure:
                closure()
            given = (closure,) * with_closure
            assert (optimizer.step(*given) is not None) == with_closure
        assert pruner.rigl_steps == 3
        weights.append(model.state_dict())
    assert sparse.equal(*weights)


@pytest.mark.parametrize("before", [True, False])
def test_lr_schedulers_made_before_or_after(before):
    model = sparse.convnet()
    optimizer = sparse.sgd(model)
    pruner = None if before else sparse.pruned(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    pruner = pruner or sparse.pruned(model, optimizer)
    step = optimizer.step
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.step == step
