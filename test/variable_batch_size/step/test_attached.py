"""Schedulers driven by updates, samples and epochs."""

import itertools
import math
from contextlib import nullcontext
from copy import deepcopy

import numpy as np
import pytest
from support.variable_batch_size import wrapping
from support.variable_batch_size.elastic import Case, Training
from support.xla_replica.replicas import BACKENDS
from torch import nn
from torch.optim import AdamW, lr_scheduler
from torch.optim.lr_scheduler import StepLR

import variable_batch_size as vbs
from xla_replica import ReplicaError

# In samples; minibatches of 2, so 8 replicas take 4 substeps and idle, by turns.
CASE = Case(
    (2, 64, 8, 22, 2, 30), 4, "sgd", "constant", 1.0, num_samples=100, minibatch_size=2
)  # two epochs of the trace: 96 and, again, 96 + ...
EVERY = {"updates": 2, "samples": 25, "epochs": 1}


def train_all(rank: int) -> list[tuple]:
    """Returns updates at the rate 0.5 ** ticks, and the last rate, for each unit."""
    found = []
    for unit, every in EVERY.items():
        optimizer = (training := Training(CASE)).optimizer
        optimizer.attach(lr_scheduler.ExponentialLR(optimizer, 0.5), unit, every)
        training.train()
        found.append((training.updates, optimizer.get_lr()[0]))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scheduler_has_ticked_as_often_as_units_have_passed(backend):
    for outcome in backend.run(train_all):
        for (unit, every), (updates, last) in zip(EVERY.items(), outcome):
            count = {
                "updates": [1] * len(updates),
                "samples": [update.batch_size for update in updates],
                "epochs": [update.ends_epoch for update in updates],
            }
            done = itertools.accumulate(count[unit])
            ticks = [0, *(math.floor(each / every) for each in done)]
            assert [*(u.lr[0] for u in updates), last] == [0.5**tick for tick in ticks]
            assert ticks[-1] >= 3
            assert sum(count["epochs"]) == 4


def make():
    weight, sampler, optimizer = wrapping.one_weight(
        8, size=64, minibatch_size=2, numbers=1, lr=1.0, ref_batchsize=2
    )
    optimizer.minibatches = wrapping.minibatches(sampler, optimizer)
    return weight, optimizer


def run(weight, optimizer, updates: int) -> None:
    for index, _ in zip(range(4 * updates), optimizer.minibatches):
        (weight * (1 + index % 4)).sum().backward()
        optimizer.step()


def test_what_belongs_to_another_optimizer_is_refused(tmp_path):
    (_, own), (weight, optimizer) = make(), make()
    parts = {"model": nn.ParameterList([weight])}
    for target in (
        vbs.RunLog(tmp_path / "run.jsonl", optimizer),
        vbs.Checkpointer(tmp_path, optimizer, stop_on=(), **parts),
        vbs.BatchSizeController(optimizer, least=2, most=8, policy=vbs.per_replica(2)),
    ):
        with pytest.raises(ValueError, match="was built with another optimizer"):
            own.attach(target)
        optimizer.attach(target)


def test_fractions_and_composed_schedulers():
    weight, optimizer = make()
    warm_up = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=16)
    parts = [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 32)]
    chain = lr_scheduler.SequentialLR(optimizer, parts, milestones=[16])
    optimizer.attach(chain, "samples", 0.5)  # 16 ticks an update
    run(weight, optimizer, 2)
    assert optimizer.get_lr()[0] == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 2))


@pytest.mark.parametrize("unit", EVERY)
def test_a_saved_state_knows_how_far_its_schedulers_are(unit):
    weight, optimizer = make()
    scheduler = StepLR(optimizer, 1, 0.5)
    optimizer.attach(scheduler, unit, EVERY[unit])
    run(weight, optimizer, 9)
    state, of_scheduler = deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    run(weight, optimizer, 9)
    again, other = make()
    restored = StepLR(other, 1, 0.5)
    other.attach(restored, unit, EVERY[unit])
    other.load_state_dict(state)
    restored.load_state_dict(of_scheduler)
    run(again, other, 1)  # where the first one stood: 9 updates, one into epoch 1
    other.load_state_dict(state)
    other.minibatches = wrapping.minibatches(other.sampler, other)
    restored.load_state_dict(of_scheduler)
    run(again, other, 9)
    assert other.get_lr() == optimizer.get_lr()


@pytest.mark.parametrize("on_inner", [False, True])
def test_a_scheduler_sees_the_reference_learning_rate(on_inner):
    model, sampler, wrapper = wrapping.make()
    scheduler = StepLR(wrapper.inner if on_inner else wrapper, 1, gamma=0.5)
    used = []
    wrapper.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
    for _ in sampler:
        wrapping.backward(model)
        if wrapper.step():
            scheduler.step()
    assert used == pytest.approx([0.2, 0.3 / 2, 0.3 / 4])
    assert scheduler.get_last_lr() == [*wrapper.get_lr()] == pytest.approx([0.1 / 8])


DIVERGES = r"call optimizer.attach\(scheduler\)"
IDLE, WITHIN = [32, 64, 32, 32, 64, 32], "changed within step 0 of epoch 0"


@pytest.mark.parametrize(("rank", "replicas", "trace", "each", "lr", "message"), [
    # Stepped in the loop it would miss the joined updates.
    (0, 2, IDLE, False, 0.1, DIVERGES),
    (0, 2, IDLE, False, np.float32(0.1), DIVERGES),
    (1, 2, IDLE, False, 0.1, DIVERGES),
    # Or tick by minibatch, of which one replica runs two and the other one.
    (0, 1, 96, True, 0.1, WITHIN),
    (0, 2, 96, True, 0.1, WITHIN),
    (1, 2, 96, True, 0.1, None),  # its own view is consistent
])  # fmt: skip
def test_schedulers_that_would_diverge(rank, replicas, trace, each, lr, message):
    model, sampler, wrapper = wrapping.make(trace, rank=rank, replicas=replicas, lr=lr)
    scheduler = StepLR(wrapper, 1)
    wrapper.set_epoch(0)
    told = pytest.raises(ReplicaError, match=message) if message else nullcontext()
    with told:
        for _ in sampler:
            wrapping.backward(model)
            if wrapper.step() or each:
                scheduler.step()


@pytest.mark.parametrize("name", ["lr", "weight_decay", "betas", "eps"])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_what_a_step_hook_changes_and_would_be_restored_is_an_error(name, when):
    model, _sampler, wrapper = wrapping.make([32, 32], AdamW, vbs.RootRuleOptimizer)
    group = wrapper.param_groups[0]
    before = group[name]
    other = (0.5, 0.5) if name == "betas" else before / 2
    hook = getattr(wrapper, f"register_step_{when}_hook")
    hook(lambda *_: group.update({name: other}))
    next(wrapper.minibatches)
    wrapping.backward(model)
    with pytest.raises(ValueError, match=rf"'{name}' of .*use optimizer\.attach"):
        wrapper.step()
    assert group[name] == before


def test_the_rates_to_come_are_foretold_and_nothing_changes():
    weight, optimizer = make()
    parts = [lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n), StepLR(optimizer, 2)]
    for part in parts:
        optimizer.attach(part)
    run(weight, optimizer, 3)
    attached = optimizer.updates.attached
    foretold = attached.next_rates(2)
    assert foretold == attached.next_rates(2)
    rates = []
    for _ in range(2):
        run(weight, optimizer, 1)
        rates.append(optimizer.get_lr())
    assert [*foretold.values()] == rates
    optimizer.attach(lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=5))
    assert 3 < len(attached.next_rates(9)) < 9  # until that one ends
