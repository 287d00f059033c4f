"""Reported costs of sparse training are those published, and those counted by hand."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from support.rigl_xla.resnet import RESNET50_WEIGHTS
from support.rigl_xla.sparse import pruned, sgd, sparse_convnet, train
from support.variable_batch_size.reports import Writer, run
from torch import nn

from rigl_xla import RigLScheduler, TopologyLog, costs_of, weights_of
from tools.references import resnet50


@pytest.fixture(scope="module")
def big():
    model = resnet50.resnet50()
    images = torch.zeros(1, 3, 224, 224)
    costs = costs_of(model, images)
    # Google counts the first convolution as if padded images were padded again.
    first = dataclasses.replace(costs["conv1.weight"], positions=115**2)
    return model, costs, {**costs, "conv1.weight": first}


def test_the_models_weights_are_those_of_resnet50(big):
    model = big[0]
    shapes = {w.name: tuple(w.parameter.shape) for w in weights_of(model)}
    assert shapes == RESNET50_WEIGHTS
    assert sum(p.numel() for p in model.parameters()) == 25_557_032


# Sparsity, distribution: size in MB; forward pass at 224 and as Google counts it;
# training by RigL, by SNFS, by SET. As published, or derived from what is published.
TABLE = {
    (0.9, "erk"): (13.499, 0.2429, 0.2431, 0.2456, 0.4954, 0.2431),
    (0.8, "uniform"): (23.729, 0.2241, 0.2254, 0.2279, 0.4836, 0.2254),
}


@pytest.mark.parametrize("row", TABLE)
def test_a_report_of_resnet50_is_the_published_table(big, row):
    model, costs, google = big
    model = copy.deepcopy(model)  # which stays dense for the other row
    sparsity, distribution = row
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with RigLScheduler(
        model, optimizer, 1 - sparsity, 1000, distribution, ignore_linear_layers=False
    ) as pruner:
        here, there = pruner.report(costs).cost, pruner.report(google).cost
    size, at_224, at_230, rigl, snfs, sets = TABLE[row]
    assert here.size_in_bytes / 1e6 == pytest.approx(size, abs=1e-3)
    assert here.dense_size_in_bytes / 1e6 == pytest.approx(102.122, abs=1e-3)
    assert here.inference_ratio == pytest.approx(at_224, abs=1e-4)
    assert there.inference_ratio == pytest.approx(at_230, abs=1e-4)
    assert here.dense_flops / 1e9 == pytest.approx(8.189, abs=1e-3)
    assert there.dense_flops / 1e9 == pytest.approx(8.202, abs=1e-3)
    assert here.dense_macs / 1e9 == pytest.approx(4.0892, abs=1e-4)
    assert there.training_ratio == pytest.approx(rigl, abs=1e-4)
    ratios = there.training_ratios
    assert ratios["snfs"] == pytest.approx(snfs, abs=1e-4)
    assert ratios["set"] == ratios["static"] == pytest.approx(sets, abs=1e-4)
    assert ratios["dense"] == 1
    assert "gmp" not in ratios


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
