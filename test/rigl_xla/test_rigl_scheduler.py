"""What stays sparse in a training loop with RigLScheduler, what moves, and when."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.rigl_xla import sparse
from torch import nn


@pytest.mark.parametrize("kind", sparse.OPTIMIZERS)
def test_every_optimizer_keeps_inactive_weights_and_their_state_at_zero(kind):
    model, optimizer, pruner = sparse.sparse_convnet(kind)
    before, active = copy.deepcopy(pruner.masks), sparse.counts(pruner)
    assert active == [231, 820, 32]  # 1152 - floor(0.8 * 1152), ...
    for step in range(15):
        sparse.train(model, optimizer, pruner, range(step, step + 1))
        assert sparse.counts(pruner) == active
        assert sparse.inactive_are_zero(pruner)
    assert pruner.rigl_steps == 4
    assert not sparse.equal(pruner.masks, before)


def test_the_step_that_changes_the_topology_changes_no_other_weight():
    model, optimizer, pruner = sparse.sparse_convnet()
    sparse.train(model, optimizer, pruner, range(2))
    before, masks = copy.deepcopy(model.state_dict()), copy.deepcopy(pruner.masks)
    sparse.train(model, optimizer, pruner, range(2, 3))
    for name, weight in model.state_dict().items():
        old, new = masks.get(name), pruner.masks.get(name)
        kept = torch.ones_like(weight, dtype=torch.bool) if old is None else old & new
        assert torch.equal(weight, torch.where(kept, before[name], 0.0)), name
        if old is not None:
            grown = new & ~old
            assert grown.any()
            assert torch.equal(new.sum(), old.sum())


@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("kind", sorted(set(sparse.OPTIMIZERS) - {"sgd-plain"}))
def test_a_grown_connection_begins_without_the_optimizers_past(kind, skip_step):
    """That holds where there was optimizer state, as in a loaded state."""
    options = {"skip_step": skip_step, "bound_new_steps": False}
    model, optimizer, pruner = sparse.sparse_convnet(kind, **options)
    sparse.train(model, optimizer, pruner, range(2))
    kept_of = {}
    for name in pruner.masks:
        weight = model.get_parameter(name)
        state = optimizer.state[weight].values()
        kept_of[name] = [v for v in state if v.shape == weight.shape]
        assert kept_of[name]
        for tensor in kept_of[name]:
            tensor.fill_(1.0)
    masks = copy.deepcopy(pruner.masks)
    sparse.train(model, optimizer, pruner, range(2, 3))
    for name, new in pruner.masks.items():
        grown, kept = new & ~masks[name], new & masks[name]
        assert grown.any()
        for tensor in kept_of[name]:
            assert not tensor[grown].any()
            assert tensor[kept].all()


@pytest.mark.parametrize("optimizer_of", [torch.optim.AdamW, torch.optim.NAdam])
def test_new_connections_move_no_further_under_adam_than_nine_in_ten_others(
    optimizer_of,
):
    """Where second moments begin at zero they move several times as far."""
    furthest = {}
    for bound in (True, False):
        torch.manual_seed(0)
        layers = nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU()
        model = nn.Sequential(*layers, nn.Linear(64, 1))
        optimizer = optimizer_of(model.parameters(), 1e-3, weight_decay=0.0)
        pruner = sparse.pruned(
            model, optimizer, delta=50, T_end=1000, bound_new_steps=bound
        )
        generator = torch.Generator().manual_seed(1)
        weight, grown, found = model[2].weight, None, []
        for _ in range(360):
            x = torch.randn(16, 32, generator=generator)
            noise = torch.randn(16, 1, generator=generator)
            F.mse_loss(model(x), x[:, :1].sin() + noise).backward()
            before, mask = weight.detach().clone(), pruner.masks["2.weight"].clone()
            if pruner():
                optimizer.step()
            else:
                grown = pruner.masks["2.weight"] & ~mask
            moved = (weight.detach() - before).abs() / 1e-3
            if grown is not None and pruner.step > 150 and 0 < pruner.step % 50 <= 10:
                others = moved[pruner.masks["2.weight"] & ~grown]
                found.append((moved[grown].median() / others.quantile(0.9)).item())
            optimizer.zero_grad()
        furthest[bound] = max(found)
    assert furthest[True] < 1.5, furthest
    assert furthest[False] > 3, furthest


def test_the_rates_of_rprop_begin_at_their_initial_value():
    model = sparse.convnet()
    optimizer = torch.optim.Rprop(model.parameters(), 0.01)
    pruner = sparse.pruned(model, optimizer)
    sparse.train(model, optimizer, pruner, range(2))
    masks = copy.deepcopy(pruner.masks)
    sparse.train(model, optimizer, pruner, range(2, 3))
    for name, new in pruner.masks.items():
        rates = optimizer.state[model.get_parameter(name)]["step_size"]
        grown = new & ~masks[name]
        assert grown.any()
        assert (rates[grown] == 0.01).all()
        assert not rates[~new].any()


def test_the_strongest_stay_and_the_largest_gradients_grow():
    model, optimizer, pruner = sparse.sparse_convnet(delta=1, T_end=100)
    masks = copy.deepcopy(pruner.masks)
    weights = {name: model.get_parameter(name).detach().clone() for name in masks}
    dense = {}
    for name in masks:
        parameter = model.get_parameter(name)
        parameter.register_hook(lambda grad, name=name: dense.update({name: grad}))
    pruner.close()  # so that its hooks come after those of this test
    pruner = sparse.pruned(model, optimizer, delta=1, T_end=100)
    sparse.train(model, optimizer, pruner, range(1))
    for name, new in pruner.masks.items():
        num_active = int(masks[name].sum())
        num_dropped = pruner.schedule.num_dropped(1, num_active)
        strength = torch.where(masks[name], weights[name].abs(), -1).flatten()
        keep = set(
            strength.argsort(descending=True)[: num_active - num_dropped].tolist()
        )
        order = dense[name].abs().flatten().argsort(descending=True).tolist()
        grow = [index for index in order if index not in keep][:num_dropped]
        assert set(new.flatten().nonzero().flatten().tolist()) == keep | set(grow)


def test_a_layer_outside_of_the_loss_keeps_its_mask():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = sparse.sgd(model)
    pruner = sparse.pruned(model, optimizer, delta=1)
    masks = copy.deepcopy(pruner.masks)
    for _ in range(3):
        optimizer.zero_grad()
        model[1](model[0](torch.randn(4, 8))).square().sum().backward()
        pruner()
    assert not torch.equal(masks["1.weight"], pruner.masks["1.weight"])
    assert torch.equal(masks["2.weight"], pruner.masks["2.weight"])


def test_the_gradient_is_sparse_before_anyone_clips_it():
    model, optimizer, pruner = sparse.sparse_convnet(delta=2, grad_accumulation_n=2)
    for step in range(4):
        images, labels = sparse.batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        for name, mask in pruner.masks.items():
            assert not model.get_parameter(name).grad[~mask].any()
        pruner()


def test_single_call_mode_steps_and_updates_in_one():
    """Every step moves weights, and updates happen after steps 3, 6, 9 and 12."""
    model, optimizer, pruner = sparse.sparse_convnet(skip_step=False)
    changed_at = []
    for step in range(15):
        masks, bias = copy.deepcopy(pruner.masks), model[7].bias.detach().clone()
        sparse.train(model, optimizer, pruner, range(step, step + 1))
        assert not torch.equal(bias, model[7].bias)
        if not sparse.equal(masks, pruner.masks):
            changed_at.append(pruner.step)
        assert sparse.inactive_are_zero(pruner)
    assert changed_at == [3, 6, 9, 12]


def test_single_call_mode_needs_no_call_and_takes_closures():
    weights = []
    for with_closure in (False, True):
        model, optimizer, pruner = sparse.sparse_convnet(skip_step=False)

        def loss(step, model=model, optimizer=optimizer):
            images, labels = sparse.batch(step)
            optimizer.zero_grad()
            value = F.cross_entropy(model(images), labels)
            value.backward()
            return value

        for step in range(10):
            if with_closure:
                assert optimizer.step(lambda step=step: loss(step)) > 0
            else:
                loss(step)
                optimizer.step()
        assert pruner.rigl_steps == 3
        weights.append(model.state_dict())
    assert sparse.equal(*weights)


@pytest.mark.parametrize("before", [True, False])
def test_lr_schedulers_made_before_or_after(before):
    model = sparse.convnet()
    optimizer = sparse.sgd(model)
    if before:
        lrs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        sparse.pruned(model, optimizer)
    else:
        sparse.pruned(model, optimizer)
        lrs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = optimizer.step
    optimizer.step()
    lrs.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.step == step


def test_gradients_written_by_hand_are_masked_on_demand():
    model, _, pruner = sparse.sparse_convnet()
    first, *others = pruner.masks  # the first has none
    for name in others:
        weight = model.get_parameter(name)
        weight.grad = torch.where(pruner.masks[name], 2.0, torch.nan)
    pruner.apply_mask_to_gradients()
    assert model.get_parameter(first).grad is None
    for name in others:
        assert torch.equal(model.get_parameter(name).grad, 2.0 * pruner.masks[name])
