"""Reports count what the masks have, and read the device once, on demand."""

from __future__ import annotations

import copy

import pytest
import torch
from support.rigl_xla.sparse import pruned, sparse_convnet, train
from support.variable_batch_size.reports import CountingReplica
from torch import nn

from rigl_xla import METHODS, cost_of, operations_of

KINDS = {
    "rigl": {},
    "set": {"method": "set", "skip_step": False},
    "gmp": {"method": "gmp"},
    "2:4": {"structure": "2:4", "dense_allocation": 1, "exclude": ["7"]},
    "static": {"method": "static"},
}
IMAGE = torch.zeros(1, 1, 8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_the_masks(kind):
    model, optimizer, pruner = sparse_convnet(**KINDS[kind])
    assert pruner.report().drop_fraction == pytest.approx(0.3)
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
            assert (layer.size, layer.num_active) == (mask.numel(), mask.sum())
            moved = (mask & ~old).sum(), (old & ~mask).sum()
            assert (layer.num_grown, layer.num_dropped) == moved
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
    names = ("sparsity", "drop_fraction", "churn", "exploration_rate")
    numbers = {"grown": report.num_grown, "dropped": report.num_dropped}
    assert report.scalars() == numbers | {name: getattr(report, name) for name in names}


def test_a_report_reads_once_and_only_if_looked_at():
    replica = CountingReplica()
    model, optimizer, pruner = sparse_convnet(replica=replica)
    train(model, optimizer, pruner, range(4))
    early, kept = pruner.report(), pruner.masks["5.weight"].clone()
    train(model, optimizer, pruner, range(4, 8))
    late = pruner.report()
    assert (early.num_updates, early.step, late.num_updates) == (1, 4, 2)
    assert replica.num_fetches == 0
    assert early.num_grown > 0
    assert all([early.sparsity, early.churn, early.exploration_rate, str(early)])
    assert early.layers["5.weight"].num_active == kept.sum()
    assert replica.num_fetches == 1
    assert early.exploration_rate < late.exploration_rate
    assert replica.num_fetches == 2


def test_a_report_prints_as_a_table():
    model, optimizer, pruner = sparse_convnet()
    train(model, optimizer, pruner, range(4))
    lines = str(pruner.report(operations_of(model, IMAGE))).splitlines()
    assert lines[1].split()[:4] == ["2.weight", "231", "1152", "79.95%"]
    assert lines[4].startswith("all sparse layers")
    assert lines[-2].startswith("forward pass: ")
    assert lines[-1].startswith("training: 0.")
    assert lines[-1].endswith(" of dense training")


@pytest.mark.parametrize(
    ("options", "method", "num_collected"),
    [
        ({"sparsity_distribution": "erk"}, "rigl", 1),
        ({"grad_accumulation_n": 3}, "rigl", 3),
        ({"method": "set"}, "set", 0),
        ({"method": "set", "grow": "sensitivity"}, "rigl", 1),
        ({"method": "snfs"}, "snfs", 4),
        ({"static_topo": True}, "static", 0),
    ],
)
def test_the_run_costs_what_its_method_does(options, method, num_collected):
    """test_flops.py compares such costs of ResNet-50 with the published table."""
    model, _, pruner = sparse_convnet(**options)
    operations = operations_of(model, IMAGE)
    report = pruner.report(operations)
    found = {name: layer.sparsity for name, layer in report.layers.items()}
    cost = report.cost
    assert cost == cost_of(operations, found, METHODS[method], pruner.schedule)
    # Of 4 steps, so many have a dense gradient: one of three passes is dense then.
    share = (1 - cost.inference_ratio) * num_collected / 4 / 3
    assert cost.training_ratio == pytest.approx(cost.inference_ratio + share)
    assert report.scalars()["training_flops_ratio"] == cost.training_ratio
    assert report.scalars()["inference_flops_ratio"] == cost.inference_ratio


def test_gradual_pruning_needs_the_length_of_the_run():
    model, optimizer, pruner = sparse_convnet(method="gmp")
    operations = operations_of(model, IMAGE)
    report = pruner.report(operations)
    assert report.cost.inference_ratio == 1  # it begins dense
    assert report.cost.training_ratio is None
    assert "training_flops_ratio" not in report.scalars()
    assert str(report).splitlines()[-1].startswith("forward pass: ")
    short, long = (pruner.report(operations, n).cost.training_ratio for n in (14, 140))
    train(model, optimizer, pruner, range(14))
    end = pruner.report(operations, 140)
    assert end.cost.inference_ratio < end.cost.training_ratio == pytest.approx(long)
    assert long < short < 1


def test_costs_need_operations_and_these_must_fit():
    _, _, pruner = sparse_convnet()
    with pytest.raises(ValueError, match=r"rigl_xla\.operations_of\(model, inputs\)"):
        _ = pruner.report().cost
    with pytest.raises(ValueError, match=r"by '0.weight', which is not .* of another"):
        pruner.report({"0": (1, 1)})


def test_what_is_included_costs_nothing_and_what_is_excluded_is_dense():
    transposed = nn.ConvTranspose1d(6, 4, 3, groups=2)
    model = nn.Sequential(nn.Embedding(7, 6), transposed, nn.Linear(8, 5))
    options = {"dense_allocation": 0.5, "static_topo": True, "dense_first": False}
    pruner = pruned(model, include=nn.Embedding, exclude=nn.Linear, **options)
    cost = pruner.report(operations_of(model, torch.zeros(2, 6).long())).cost
    # Of 36 weights 18 are left, for 6 pixels each; 8 pixels of 4 channels come out.
    assert cost.flops == 2 * (6 * 18 + 4 * 40) + 8 * 4 + 4 * 5


@pytest.mark.parametrize("include", [(), "0", nn.Embedding, "2.weight"])
def test_a_weight_that_an_embedding_shares_is_counted_once(include):
    """By whatever name it was included, it has that of `named_parameters`."""
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12))
    model[2].weight = model[0].weight
    operations = operations_of(model, torch.zeros(1, 3, dtype=torch.long))
    options = {"include": include, "dense_allocation": 0.5, "dense_first": False}
    report = pruned(model, **options).report(operations)
    assert sorted(report.layers) == sorted(operations) == ["0.weight", "1.weight"]
    assert report.cost.dense_flops == 3 * (2 * (64 + 96) + 8 + 12)
    assert report.cost.flops == 3 * (64 + 96 + 8 + 12)
