"""What stays sparse in a training loop with RigLScheduler, what moves, and when."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from support.rigl_xla import sparse
from torch import nn


@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("kind", sparse.OPTIMIZERS)
def test_every_optimizer_keeps_inactive_weights_and_their_state_at_zero(
    kind, skip_step
):
    """Steps 3, 6, 9 and 12 move connections, and weights if not skipped."""
    model, optimizer, pruner = sparse.sparse_convnet(kind, skip_step=skip_step)
    active = sparse.counts(pruner)
    assert active == [231, 820, 32]  # 1152 - floor(0.8 * 1152), ...
    for step in range(15):
        masks, bias = copy.deepcopy(pruner.masks), model[7].bias.detach().clone()
        sparse.train(model, optimizer, pruner, range(step, step + 1))
        is_update = step + 1 in (3, 6, 9, 12)
        assert torch.equal(bias, model[7].bias) == (is_update and skip_step)
        assert sparse.equal(pruner.masks, masks) != is_update
        assert sparse.counts(pruner) == active
        assert sparse.inactive_are_zero(pruner)
    assert (pruner.step, pruner.rigl_steps) == (15, 4)


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


@pytest.mark.parametrize("of", [torch.optim.AdamW, torch.optim.NAdam])
def test_new_connections_move_no_further_under_adam_than_nine_in_ten_others(of):
    """Where second moments begin at zero they move several times as far."""
    furthest = {}
    for bound in (True, False):
        torch.manual_seed(0)
        layers = nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU()
        model = nn.Sequential(*layers, nn.Linear(64, 1))
        optimizer = of(model.parameters(), 1e-3, weight_decay=0.0)
        options = {"delta": 50, "T_end": 1000, "bound_new_steps": bound}
        pruner = sparse.pruned(model, optimizer, **options)
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
        assert rates[new & ~masks[name]].unique().tolist() == pytest.approx([0.01])
        assert not rates[~new].any()


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


def test_the_gradient_is_sparse_before_anyone_clips_it():
    model, _, pruner = sparse.sparse_convnet(delta=2, grad_accumulation_n=2)
    for step in range(4):
        model.zero_grad()
        sparse.backward(model, step)
        for name, mask in pruner.masks.items():
            assert not model.get_parameter(name).grad[~mask].any()
        pruner()


def test_single_call_mode_needs_no_call_and_takes_closures():
    weights = []
    for with_closure in (False, True):
        model, optimizer, pruner = sparse.sparse_convnet(skip_step=False)
        for step in range(10):
            optimizer.zero_grad()
            closure = functools.partial(sparse.backward, model, step)
            if with_closure:
                assert optimizer.step(closure) > 0
            else:
                closure()
                optimizer.step()
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
