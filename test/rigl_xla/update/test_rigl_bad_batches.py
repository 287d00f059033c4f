"""Batches whose gradients are not finite, or that gradient scaling leaves out."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.rigl_xla import sparse


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grad_accumulation_n": 3},
        {"structure": "constant-fan-in"},
        {"structure": "2:4", "dense_allocation": 1, "exclude": "7"},
    ],
)
def test_one_bad_batch_leaves_masks_and_counts(bad, options):
    model, optimizer, pruner = sparse.sparse_convnet(**options)
    masks, active = copy.deepcopy(pruner.masks), sparse.counts(pruner)
    sparse.train(model, optimizer, pruner, range(2))
    sparse.backward(model, 2, bad)
    assert not pruner()
    assert pruner.rigl_steps == 1
    assert sparse.equal(pruner.masks, masks)
    sparse.train(model, optimizer, pruner, range(3, 9))
    assert sparse.counts(pruner) == active
    assert all(not torch.equal(pruner.masks[name], masks[name]) for name in masks)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_one_bad_batch_stays_out_of_the_running_mean(bad, at):
    model, factor = sparse.convnet(), 1.0
    model[5].weight.register_hook(lambda gradient: gradient * factor)
    pruner = sparse.pruned(model, method="snfs", delta=5)
    active, optimizer = sparse.counts(pruner), pruner.optimizer
    sparse.train(model, optimizer, pruner, range(at))
    optimizer.zero_grad()
    before, factor = pruner.state_dict()["layers"], bad
    sparse.backward(model, at)  # bad in one layer: all leave the step out
    factor = 1.0
    pruner()  # the optimizer takes no step here
    for name, layer in pruner.state_dict()["layers"].items():
        past = before[name].get("gradient", torch.zeros_like(layer["gradient"]))
        assert torch.equal(layer["gradient"], past)
    sparse.train(model, optimizer, pruner, range(at + 1, 5))
    masks = copy.deepcopy(pruner.masks)
    sparse.train(model, optimizer, pruner, range(5, 10))
    assert sparse.counts(pruner) == active
    assert all(not torch.equal(pruner.masks[name], masks[name]) for name in masks)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("skip_step", [True, False])
def test_gradient_scaling_leaves_a_step_out_of_the_update_too(skip_step, n):
    """With skip_step=False such a step is not even counted."""
    options = {"skip_step": skip_step, "grad_accumulation_n": n}
    model, optimizer, pruner = sparse.sparse_convnet(**options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    active, first = sparse.counts(pruner), copy.deepcopy(pruner.masks)
    for step in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            images, labels = sparse.batch(step)
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        if pruner():
            scaler.step(optimizer)
            scaler.update()
        if step == 2:
            assert sparse.equal(pruner.masks, first)
    assert (pruner.step, pruner.rigl_steps) == ((10, 3) if skip_step else (9, 3))
    assert not any(torch.equal(mask, first[n]) for n, mask in pruner.masks.items())
    assert sparse.counts(pruner) == active
    assert sparse.inactive_are_zero(pruner)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("factor", [100.0, float("nan")])
def test_a_batch_that_zero_grad_discards_does_not_take_part(
    set_to_none, called, skip_step, factor
):
    """Whether or not the pruner is called for it: then its update keeps all masks."""
    runs, ends = [], skip_step and called  # the update, without a batch
    for discards in (False, True):
        model, optimizer, pruner = sparse.sparse_convnet(skip_step=skip_step)
        sparse.train(model, optimizer, pruner, range(2))
        if discards:
            optimizer.zero_grad()
            sparse.backward(model, 99, factor)
            optimizer.zero_grad(set_to_none=set_to_none)
            masks = copy.deepcopy(pruner.masks)
            assert not called or pruner() != skip_step
            assert sparse.equal(pruner.masks, masks)
        sparse.train(model, optimizer, pruner, range(3 if ends else 2, 7))
        assert pruner.rigl_steps == 2
        runs.append(pruner.masks | model.state_dict(prefix="model."))
    assert ends or sparse.equal(*runs)
