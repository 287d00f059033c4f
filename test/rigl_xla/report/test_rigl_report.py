"""Reports count what the masks have, and read the device once, on demand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.rigl_xla.sparse import pruned, sgd, sparse_convnet, train
from support.variable_batch_size.reports import KINDS, CountingReplica, Writer, run
from torch import nn

from rigl_xla import (
    Report,
    RigLScheduler,
    TopologyLog,
    costs_of,
    inference_flops,
    inference_macs,
    size_in_bytes,
    training_ratio,
)


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


def test_a_report_is_what_its_costs_say():
    """test_flops.py compares such costs of ResNet-50 with the published table."""
    model, _, pruner = sparse_convnet(sparsity_distribution="erk")
    costs = costs_of(model, torch.zeros(1, 1, 8, 8))
    report = pruner.report(costs)
    cost, found = report.cost, {n: x.sparsity for n, x in report.layers.items()}
    assert len(found) == 4
    functions = {"macs": inference_macs, "flops": inference_flops}
    for name, of in (functions | {"size_in_bytes": size_in_bytes}).items():
        assert getattr(cost, name) == of(costs, found)
        assert getattr(cost, f"dense_{name}") == of(costs)
    assert cost.training_ratios == {
        name: training_ratio(costs, found, name, pruner.delta_T)
        for name in ("dense", "static", "set", "rigl", "snfs")
    }


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({}, "rigl"),
        ({"method": "set"}, "set"),
        ({"method": "set", "grow": "sensitivity"}, "rigl"),
        ({"method": "snfs"}, "snfs"),
        ({"static_topo": True}, "static"),
    ],
)
def test_the_run_costs_what_its_method_does(options, method):
    model, _, pruner = sparse_convnet(**options)
    cost = pruner.report(costs_of(model, torch.zeros(1, 1, 8, 8))).cost
    assert cost.method == method
    assert cost.training_ratio == cost.training_ratios[method]


def test_more_dense_gradients_cost_more():
    found = []
    for n in (1, 2, 3):
        model, _, pruner = run(grad_accumulation_n=n)
        cost = pruner.report(costs_of(model, torch.zeros(1, 1, 8, 8))).cost
        found.append(cost.training_ratio)
        # Of 4 steps, n have a dense gradient: one of three passes is dense then.
        assert cost.training_ratio == pytest.approx(
            cost.inference_ratio + (1 - cost.inference_ratio) * n / 4 / 3
        )
    assert found == sorted(set(found))


def test_gradual_pruning_needs_the_length_of_the_run():
    model, optimizer, pruner = run("gmp")
    costs = costs_of(model, torch.zeros(1, 1, 8, 8))
    report = pruner.report(costs)
    assert report.cost.inference_ratio == 1  # it begins dense
    with pytest.raises(ValueError, match=r"length of the run; give report\(.*num_st"):
        _ = report.cost.training_ratio
    assert "training_flops_ratio" not in report.scalars()
    short, long = (pruner.report(costs, n).cost.training_ratio for n in (14, 140))
    train(model, optimizer, pruner, range(14))
    end = pruner.report(costs, 140)
    assert end.cost.inference_ratio < end.cost.training_ratio == pytest.approx(long)
    assert long < short < 1
    assert end.scalars()["training_flops_ratio"] == end.cost.training_ratio


def test_operations_need_costs_and_these_must_fit():
    _, _, pruner = run()
    with pytest.raises(ValueError, match=r"rigl_xla\.costs_of\(model, inputs\)"):
        _ = pruner.report().cost
    assert pruner.report().size_in_bytes > 0
    other = costs_of(nn.Sequential(nn.Linear(3, 4)), torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"another model: '0.weight' of shape \(8, 1,"):
        pruner.report(other)
    with pytest.raises(ValueError, match="another model"):
        TopologyLog(pruner, Writer(), costs=other)
    with pytest.raises(TypeError, match="costs must be a dict of LayerCost by name"):
        pruner.report([1.0])
    with pytest.raises(ValueError, match="num_steps must be an integer >= 1, got 0"):
        pruner.report(num_steps=0)


def test_weights_are_counted_with_costs_or_without():
    model = nn.Sequential(
        nn.Embedding(7, 6),  # included
        nn.ConvTranspose1d(6, 4, 3, groups=2),  # (6, 2, 3): 4 biases
        nn.Linear(8, 5),  # excluded: dense
    )
    pruner = RigLScheduler(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        0.5,
        static_topo=True,
        dense_first=False,
        ignore_linear_layers=False,
        include=nn.Embedding,
        exclude=nn.Linear,
    )
    ids = torch.zeros(2, 6, dtype=torch.int64)
    assert model(ids).shape == (2, 4, 5)
    report = pruner.report(costs_of(model, ids))
    # Of 36 weights 18 are left, for 6 pixels each; 8 pixels of 4 channels come out.
    assert report.cost.macs == 6 * 18 + 4 * 40
    assert report.cost.flops == 2 * report.cost.macs + 8 * 4 + 4 * 5
    bits = 32 * (21 + 18 + 40) + 42 + 36 + 32 * (7 + 4 + 5)
    assert report.size_in_bytes == pruner.report().size_in_bytes == bits / 8


@pytest.mark.parametrize("include", [(), "0", nn.Embedding, "2.weight"])
def test_a_weight_that_an_embedding_shares_is_counted_once(include):
    """By whatever name it was included, it has that of `named_parameters`."""
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12))
    model[2].weight = model[0].weight
    costs = costs_of(model, torch.zeros(1, 3, dtype=torch.long))
    options = {"include": include, "dense_allocation": 0.5, "dense_first": False}
    pruner = pruned(model, sgd(model), **options)
    report = pruner.report(costs)
    assert sorted(report.layers) == sorted(costs) == ["0.weight", "1.weight"]
    assert report.cost.dense_macs == 3 * (64 + 96)
    assert report.cost.macs == report.cost.dense_macs / 2
    assert report.size_in_bytes == 4 * (80 + 20) + (64 + 96) / 8


@pytest.mark.parametrize("single_call", [False, True])
def test_a_log_reads_all_updates_at_once(single_call):
    replica, writer = CountingReplica(), Writer()
    model, optimizer, pruner = run(replica=replica, skip_step=not single_call)
    costs = costs_of(model, torch.zeros(2, 1, 8, 8))
    log = TopologyLog(pruner, writer, costs=costs, prefix="sparse")
    expected = [pruner.report()]
    log()
    for step in range(14):
        train(model, optimizer, pruner, range(step, step + 1))
        if (step + 1) % 3 == 0 and step < 13:
            expected.append(pruner.report())
        log("what an elastic optimizer passes")
    assert (replica.num_fetches, writer.scalars) == (0, {})
    log.flush()
    log.flush()
    assert replica.num_fetches == 1
    Report.read(expected)
    steps = [0, 3, 6, 9, 12]
    tags = {tag.removeprefix("sparse/") for tag in writer.scalars if "/" in tag}
    assert {"sparsity", "drop_fraction", "churn", "grown", "dropped"} <= tags
    for name in ("exploration_rate", "churn", "sparsity"):
        of_all = [(r.step, getattr(r, name)) for r in expected]
        assert writer.scalars[f"sparse/{name}"] == of_all
        assert [step for step, _ in of_all] == steps
        layers = [(r.step, getattr(r.layers["5.weight"], name)) for r in expected]
        assert writer.scalars[f"sparse_{name}/5.weight"] == layers
    ratio = pruner.report(costs).cost.training_ratio
    assert writer.scalars["sparse/training_flops_ratio"][-1] == (12, ratio)
    assert writer.scalars["sparse/size_in_bytes"][0][1] == expected[0].size_in_bytes


def test_a_log_without_a_writer_keeps_nothing():
    replica = CountingReplica()
    model, optimizer, pruner = run(replica=replica)
    log = TopologyLog(pruner, None)
    train(model, optimizer, pruner, range(8))
    log()
    log.flush()
    assert replica.num_fetches == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"writer": "runs"}, "must be a SummaryWriter or have its add_scalar, got 'r"),
        ({"pruner": 3}, "pruner must be a RigLScheduler, got 3"),
        ({"layers": "no"}, "layers must be True or False"),
        ({"prefix": 3}, "prefix must be a string"),
    ],
)
def test_what_cannot_be_logged_is_refused_at_once(options, says):
    _, _, pruner = run()
    with pytest.raises(TypeError, match=says):
        TopologyLog(**{"pruner": pruner, "writer": None, **options})
