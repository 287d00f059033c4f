"""Reports count what the masks have, and read the device once, on demand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.rigl_xla.sparse import train
from support.variable_batch_size.reports import KINDS, CountingReplica, run

from rigl_xla import Report, costs_of


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_the_masks(kind):
    model, optimizer, pruner = run(kind)
    now = {name: mask.clone() for name, mask in pruner.masks.items()}
    before, ever, num_updates = now, copy.deepcopy(now), 0
    for step in range(14):
        train(model, optimizer, pruner, range(step, step + 1))
        if pruner.rigl_steps > num_updates:
            num_updates = pruner.rigl_steps
            before, now = now, {n: mask.clone() for n, mask in pruner.masks.items()}
            ever = {name: ever[name] | mask for name, mask in now.items()}
        report = pruner.report()
        assert (report.step, report.num_updates) == (step + 1, num_updates)
        assert report.layers.keys() == now.keys()
        for name, layer in report.layers.items():
            mask, old = now[name], before[name]
            assert layer.size == mask.numel()
            assert layer.num_active == mask.sum()
            assert layer.num_grown == (mask & ~old).sum()
            assert layer.num_dropped == (old & ~mask).sum()
            assert layer.num_explored == ever[name].sum()
            assert layer.churn == layer.num_grown / layer.num_active
            assert layer.sparsity == 1 - layer.num_active / layer.size
    assert num_updates == (0 if kind == "static" else 4)
    sizes = sum(mask.numel() for mask in now.values())
    explored = sum(int(mask.sum()) for mask in ever.values())
    assert report.exploration_rate == explored / sizes
    if kind in ("rigl", "set"):
        assert report.exploration_rate > 1 - report.sparsity
        assert report.num_grown == report.num_dropped > 0
    assert report.drop_fraction == 0
    assert run(kind)[2].report().drop_fraction == pytest.approx(0.3)


def test_a_batch_that_is_not_finite_changes_nothing():
    model, optimizer, pruner = run("gmp")
    train(model, optimizer, pruner, range(3))
    before = pruner.report()
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = math.nan
    train(model, optimizer, pruner, range(3, 6))
    after = pruner.report()
    assert after.num_updates == 2
    assert after.num_dropped == after.num_grown == 0
    for name, layer in after.layers.items():
        assert layer.num_active == before.layers[name].num_active == layer.size - (
            ~pruner.masks[name]
        ).sum()  # fmt: skip


def test_a_report_reads_once_and_only_if_looked_at():
    replica = CountingReplica()
    model, optimizer, pruner = run(replica=replica)
    train(model, optimizer, pruner, range(4))
    early = pruner.report()
    kept = copy.deepcopy(pruner.masks)
    train(model, optimizer, pruner, range(4, 8))
    late = pruner.report()
    assert (early.num_updates, early.step, late.num_updates) == (1, 4, 2)
    assert replica.num_fetches == 0
    assert early.num_grown > 0
    assert replica.num_fetches == 1
    for value in (early.sparsity, early.churn, early.exploration_rate, str(early)):
        assert value
    assert early.layers["5.weight"].num_active == kept["5.weight"].sum()
    assert replica.num_fetches == 1
    assert early.exploration_rate < late.exploration_rate
    assert replica.num_fetches == 2
    reports = [pruner.report() for _ in range(3)]
    Report.read([late, *reports])
    assert replica.num_fetches == 3
    assert [report.churn for report in reports] == [late.churn] * 3
    assert replica.num_fetches == 3


@pytest.mark.parametrize("kind", ["rigl", "set"])
def test_exploration_survives_a_checkpoint(kind):
    model, optimizer, pruner = run(kind)
    train(model, optimizer, pruner, range(7))
    states = copy.deepcopy(
        [model.state_dict(), optimizer.state_dict(), pruner.state_dict()]
    )
    train(model, optimizer, pruner, range(7, 13))
    again, other, resumed = run(kind)
    for part, state in zip((again, other, resumed), states):
        part.load_state_dict(state)
    train(again, other, resumed, range(7, 13))
    assert resumed.report().layers == pruner.report().layers
    for name, layer in states[2]["layers"].items():
        del layer["ever_active"]
        assert name in pruner.masks
    resumed.load_state_dict(states[2])  # of an older release
    report = resumed.report()
    assert report.exploration_rate == pytest.approx(1 - report.sparsity)


def test_a_report_prints_as_a_table():
    model, optimizer, pruner = run()
    train(model, optimizer, pruner, range(4))
    text = str(pruner.report(costs_of(model, torch.zeros(1, 1, 8, 8))))
    lines = text.splitlines()
    assert lines[1].split()[:4] == ["2.weight", "231", "1152", "79.95%"]
    assert lines[4].startswith("all sparse layers")
    assert lines[-3].endswith("MB stored")
    assert lines[-2].startswith("forward pass: ")
    assert lines[-1].startswith("training: dense 1.0000, static 0.")
