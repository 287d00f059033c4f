"""Gradients that are assigned to ``.grad`` move the topology as backward passes do."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from support.grab_xla import training
from support.rigl_xla import sparse
from support.xla_replica.replicas import backends, row
from torch import nn

import per_sample_grad as psg
import xla_replica
from xla_replica import LocalReplica


def by_backward(model, images, labels):
    F.cross_entropy(model(images), labels).backward()


def assign(model, gradients):
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]


def by_capture(model, images, labels):
    with psg.capture(model) as recorded:
        losses = F.cross_entropy(model(images), labels, reduction="none")
    gradients = recorded.backward(losses).materialize()
    assign(model, {name: rows.mean(0) for name, rows in gradients.items()})


def by_autograd(model, images, labels):
    loss = F.cross_entropy(model(images), labels)
    found = torch.autograd.grad(loss, list(model.parameters()))
    assign(model, dict(zip(dict(model.named_parameters()), found)))


def by_passes(model, images, labels):
    """Takes the gradient of each sample away and assigns the mean."""
    rows: dict[str, list[torch.Tensor]] = {}
    for image, label in zip(images, labels):
        model.zero_grad()
        F.cross_entropy(model(image[None]), label[None]).backward()
        for name, parameter in model.named_parameters():
            rows.setdefault(name, []).append(parameter.grad)
    assign(model, {name: torch.stack(found).mean(0) for name, found in rows.items()})


OPTIONS = {
    "rigl": {},
    "single-call": {"skip_step": False},
    "window": {"grad_accumulation_n": 3},
    "snfs": {"method": "snfs"},
}


@functools.cache
def run_of(gradients, kind: str):
    """Returns masks after every step, and the pruner."""
    model = sparse.convnet().double()
    pruner = sparse.pruned(model, **OPTIONS[kind])
    found = []

    def backward(model, step):
        images, labels = sparse.batch(step)
        gradients(model, images.double(), labels)

    for step in range(13):
        sparse.train(model, pruner.optimizer, pruner, range(step, step + 1), backward)
        found.append(copy.deepcopy(pruner.masks))
    return found, pruner


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("gradients", [by_capture, by_autograd, by_passes])
def test_topology_and_weights_are_those_of_backward_passes(gradients, kind):
    expected, other = run_of(by_backward, kind)
    found, pruner = run_of(gradients, kind)
    assert all(map(sparse.equal, found, expected))
    assert not sparse.equal(found[0], found[-1])
    assert pruner.rigl_steps == other.rigl_steps == 4
    assert sparse.inactive_are_zero(pruner)
    weights, others = (each.model.state_dict() for each in (pruner, other))
    torch.testing.assert_close(weights, others, rtol=0, atol=1e-12)


def test_gradients_that_are_masked_before_they_are_clipped_are_collected_first():
    """What is not finite is masked, too, and a layer without a gradient keeps none."""
    found = []
    for gradients in (by_backward, by_capture):
        model, _, pruner = sparse.sparse_convnet(delta=1)
        gradients(model, *sparse.batch(0))
        pruner.apply_mask_to_gradients()
        for name, mask in pruner.masks.items():
            assert not model.get_parameter(name).grad[~mask].any()
        assert not pruner()
        found.append(pruner.masks)
    assert sparse.equal(*found)
    model, _, pruner = sparse.sparse_convnet()
    layer, mask = model[5], pruner.masks["5.weight"]
    layer.weight.grad = torch.where(mask, 2.0, torch.nan)
    pruner.apply_mask_to_gradients()
    assert torch.equal(layer.weight.grad, 2.0 * mask)
    assert model[2].weight.grad is None


@pytest.mark.parametrize("kind", ["nothing", "zeros", "masked"])
@pytest.mark.parametrize("skip_step", [True, False])
def test_an_update_without_a_dense_gradient_is_an_error(kind, skip_step):
    model, optimizer, pruner = sparse.sparse_convnet(skip_step=skip_step)
    active = sparse.counts(pruner)

    def step():
        for parameter in model.parameters() if kind != "nothing" else ():
            parameter.grad = torch.full_like(parameter, float(kind == "masked"))
        for name, mask in pruner.masks.items() if kind == "masked" else ():
            model.get_parameter(name).grad.mul_(mask)
        if pruner():
            optimizer.step()

    step()
    step()
    with pytest.raises(RuntimeError, match=r"apply_mask_to_gradients\(\) before"):
        step()
    assert (pruner.step, pruner.rigl_steps) == (2, 0)
    assert sparse.counts(pruner) == active


# --- five packages in one loop ------------------------------------------------------

NUM_SAMPLES, EPOCHS, TRACE = 96, 3, [8, 24, 12, 4]
OFTEN = {"skip_step": False, "T_end": 30, "delta": 2, "dense_first": False}


IMAGES, LABELS = sparse.batch(0, NUM_SAMPLES)
SAMPLES = torch.utils.data.TensorDataset(IMAGES.double(), LABELS)


def network():
    with LocalReplica("cpu").seeded(0):
        parts = [nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)]
    return nn.Sequential(*parts).double()


def composed_run(rank: int, hand: bool):
    """Returns masks and minibatches by update, and counts by epoch."""
    replica = xla_replica.current()
    model = network().to(replica.device)
    grab = training.sampler_of(model, NUM_SAMPLES)
    run = training.Training(model, sparse.sgd(model), grab, trace=TRACE)
    pruner = sparse.pruned(model, run.optimizer, **OFTEN)
    masks, minibatches, totals = [], [[]], []

    def note(update):
        masks.append([mask.clone() for mask in pruner.masks.values()])
        minibatches.append([])

    def minibatch(indices):
        minibatches[-1].append(list(indices))
        x, y = replica.send(SAMPLES[indices])
        with psg.capture(model) as recorded:
            losses = F.cross_entropy(model(x), y, reduction="none")
        gradients = recorded.backward(losses, retain_graph=not hand).materialize()
        grab.step(gradients)
        for name, parameter in model.named_parameters() if hand else ():
            parameter.grad.add_(gradients[name].mean(0))
        if not hand:
            losses.mean().backward()
        pruner()

    run.optimizer.attach(note)
    for epoch in range(EPOCHS):
        with xla_replica.count(replica) as count:
            run.epoch(epoch, minibatch)
        totals.append((count.compilations, count.transfers, count.fallbacks))
    assert pruner.step == run.sampler.plan.num_steps * EPOCHS
    assert pruner.rigl_steps == min(pruner.step, 29) // 2
    pruner.check_replicas()
    return [replica.fetch(each) for each in masks], minibatches, totals


composed_run_of_one = functools.cache(functools.partial(composed_run, 0))


@pytest.mark.parametrize("hand", [False, True], ids=["backward", "assigned"])
def test_with_grab_captures_and_the_elastic_wrapper_as_in_a_plain_loop(hand):
    masks, minibatches, _ = composed_run_of_one(hand)
    *minibatches, left = minibatches
    assert left == []
    sizes = [4 * len(step) for step in minibatches]
    assert sizes == TRACE * 2 * EPOCHS
    first, *_, last = ([i for part in step for i in part] for step in minibatches[::8])
    assert first != last  # the order moves
    assert not sparse.same(masks[:1], masks[-1:])  # and so does the topology
    model = network()
    pruner = sparse.pruned(model, optimizer := sparse.sgd(model), **OFTEN)
    for step, found in zip(minibatches, masks, strict=True):
        optimizer.zero_grad()
        for indices in step:
            by_backward(model, *SAMPLES[indices])
        for parameter in model.parameters():
            parameter.grad /= len(step)
        optimizer.param_groups[0]["lr"] = 0.1 * 4 * len(step) / 8
        optimizer.step()
        assert sparse.same(found, [*pruner.masks.values()])


@pytest.mark.parametrize("backend", [
    row("cpu", 2), row("cpu", 3), row("xla", 2), *backends("xla", slow=(1, 8)),
])  # fmt: skip
def test_on_replicas_of_which_some_are_idle(backend):
    hands = (False, True) if backend.device == "cpu" else (backend.num_replicas > 1,)
    given = [(hand,) for hand in hands]
    for found in backend.run(sparse.for_each, composed_run, given, timeout=300.0):
        for hand, (masks, _, totals) in zip(hands, found, strict=True):
            assert sparse.same(masks, composed_run_of_one(hand)[0])
            if backend.device == "xla":
                compilations, transfers, fallbacks = zip(*totals[1:])
                assert (compilations, fallbacks) == ((0, 0), ({}, {}))
                # GraB's signs, once an epoch on each replica, whose epochs overlap.
                assert sum(transfers) <= backend.num_replicas * EPOCHS
