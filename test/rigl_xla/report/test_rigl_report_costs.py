"""Reported costs of sparse training are those published, and those counted by hand."""

from __future__ import annotations

import pytest
import torch
from support.rigl_xla.sparse import pruned, sgd, sparse_convnet, train
from support.variable_batch_size.reports import Writer, run
from torch import nn

from rigl_xla import (
    RigLScheduler,
    TopologyLog,
    costs_of,
    inference_flops,
    inference_macs,
    size_in_bytes,
    training_ratio,
)


def test_a_report_is_what_its_costs_say():
    """test_flops.py compares such costs of ResNet-50 with the published table."""
    model, _, pruner = sparse_convnet(sparsity_distribution="erk")
    costs = costs_of(model, torch.zeros(1, 1, 8, 8))
    report = pruner.report(costs)
    cost, found = report.cost, {n: x.sparsity for n, x in report.layers.items()}
    assert len(found) == 4
    assert cost.macs == inference_macs(costs, found)
    assert cost.flops == inference_flops(costs, found)
    assert cost.size_in_bytes == size_in_bytes(costs, found)
    assert cost.dense_macs == inference_macs(costs)
    assert cost.dense_flops == inference_flops(costs)
    assert cost.dense_size_in_bytes == size_in_bytes(costs)
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
