"""Reports count what the masks have, and operations are those that torch counts."""

import copy
import functools

import pytest
import torch
from support.rigl_xla.resnet import RESNET50_WEIGHTS
from support.rigl_xla.sparse import pruned, sparse_convnet, train
from support.variable_batch_size.wrapping import CountingReplica
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rigl_xla import METHODS, UpdateSchedule, allocate, cost_of, operations_of
from rigl_xla.topology.update_schedule import gradual_sparsity
from tools.references import resnet50 as reference

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
    before = ever = now = copy.deepcopy(pruner.masks)
    num_updates = 0
    for step in range(14):
        train(model, optimizer, pruner, range(step, step + 1))
        if pruner.rigl_steps > num_updates:
            num_updates = pruner.rigl_steps
            before, now = now, copy.deepcopy(pruner.masks)
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
    replica = CountingReplica("cpu")
    model, optimizer, pruner = sparse_convnet(replica=replica)
    replica.num_fetches = 0
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


@pytest.mark.parametrize(("options", "method", "num_collected"), [
    ({"sparsity_distribution": "erk"}, "rigl", 1),
    ({"grad_accumulation_n": 3}, "rigl", 3),
    ({"method": "set"}, "set", 0),
    ({"method": "set", "grow": "sensitivity"}, "rigl", 1),
    ({"method": "snfs"}, "snfs", 4),
    ({"static_topo": True}, "static", 0),
])  # fmt: skip
def test_the_run_costs_what_its_method_does(options, method, num_collected):
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
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12))
    model[2].weight = model[0].weight
    operations = operations_of(model, torch.zeros(1, 3, dtype=torch.long))
    options = {"include": include, "dense_allocation": 0.5, "dense_first": False}
    report = pruned(model, **options).report(operations)
    assert sorted(report.layers) == sorted(operations) == ["0.weight", "1.weight"]
    assert report.cost.dense_flops == 3 * (2 * (64 + 96) + 8 + 12)
    assert report.cost.flops == 3 * (64 + 96 + 8 + 12)


# --- operations: as published of ResNet-50, and as torch counts them ------------------


@functools.cache
def resnet_operations(conv1_side: int = 112) -> dict[str, tuple[float, float]]:
    """Returns operations; Google counts the first convolution at 115 pixels, padded."""
    found = operations_of(reference.resnet50(), torch.zeros(1, 3, 224, 224))
    share = (conv1_side / 112) ** 2
    return found | {"conv1.weight": tuple(share * x for x in found["conv1.weight"])}


@pytest.mark.parametrize(("sparsities", "at_224", "at_230", "training"), [
    ((0.8, "erk", None, False), 0.4146, 0.4153, 0.4172),
    ((0.8, "uniform", None, True), 0.2241, 0.2254, 0.2279),
    ((0.9, "erk", None, False), 0.2429, 0.2431, 0.2456),
    ((0.9, "uniform", None, True), 0.1272, 0.1285, 0.1314),
    ((0.95, "erk", None, False), 0.1229, 0.1230, 0.1259),
    ((0.95, "uniform", None, True), 0.0787, 0.0801, 0.0831),
    ((0.965, "uniform", None, True), 0.0641, 0.0656, 0.0687),
    ((0.965, "erk", None, False), 0.0864, None, None),
    ((0.965, "erk", None, True), 0.1111, 0.1125, 0.1154),
    ((0.99, "erk", None, True), 0.0533, 0.0548, 0.0579),
])  # fmt: skip
def test_resnet50_costs_what_was_published(sparsities, at_224, at_230, training):
    """Inference counted at 224 and at 230 pixels, and RigL's training at 230."""
    found = allocate(RESNET50_WEIGHTS, *sparsities)
    cost, published = (cost_of(resnet_operations(side), found) for side in (112, 115))
    assert cost.inference_ratio == pytest.approx(at_224, abs=1e-4)
    if at_230 is not None:
        assert published.inference_ratio == pytest.approx(at_230, abs=1e-4)
        assert published.training_ratio == pytest.approx(training, abs=1e-4)


def test_dense_resnet50():
    macs = {name: macs for name, (macs, _) in resnet_operations().items()}
    assert sum(macs.values()) / 1e9 == pytest.approx(4.0892, abs=1e-4)
    for side, flops in [(112, 8.189), (115, 8.202)]:
        cost = cost_of(resnet_operations(side), {})
        assert cost.flops / 1e9 == pytest.approx(flops, abs=1e-3)
        assert (cost.inference_ratio, cost.training_ratio) == (1, 1)
    assert macs.keys() == RESNET50_WEIGHTS.keys()
    parameters = reference.resnet50().parameters()
    assert sum(p.numel() for p in parameters) == 25_557_032
    cubes = {macs[n] for n, shape in RESNET50_WEIGHTS.items() if shape[2:] == (3, 3)}
    assert cubes == {115_605_504}


@pytest.mark.parametrize(("sparsity", "snfs", "exact", "published", "of_33", "of_32"), [
    (0.8, 0.61, 0.6102, 0.56, 0.5603, 0.5707),
    (0.9, 0.50, 0.4954, 0.51, 0.5053, 0.5171),
])  # fmt: skip
def test_snfs_and_gradual_pruning_cost_what_was_published(
    sparsity, snfs, exact, published, of_33, of_32
):
    operations = resnet_operations(115)
    found = allocate(RESNET50_WEIGHTS, sparsity, "erk")
    ratio = cost_of(operations, found, "snfs").training_ratio
    assert (ratio, round(ratio, 2)) == (pytest.approx(exact, abs=1e-4), snfs)
    found = allocate(RESNET50_WEIGHTS, sparsity)

    def reading(step: int, *ends: int) -> float:
        now = {n: gradual_sparsity(step, s, *ends) for n, s in found.items()}
        return cost_of(operations, now).inference_ratio

    # The authors average 33 readings, both ends included; masks change 32 times.
    steps = range(0, 33_000, 1_000)
    theirs = [reading(step, 10_000, 25_000) for step in steps]
    assert sum(theirs) / 33 == pytest.approx(of_33, abs=1e-4)
    assert round(sum(theirs) / 33, 2) == published
    assert sum(theirs[:-1]) / 32 == pytest.approx(of_32, abs=1e-4)
    # A run of this package begins to prune at once.
    schedule = UpdateSchedule(25_001, delta=1_000)
    cost = cost_of(operations, found, "gmp", schedule, num_steps=32_000)
    ours = [reading(step, 0, 25_000) for step in steps[:-1]]
    assert cost.training_ratio == pytest.approx(sum(ours) / 32)


@pytest.mark.parametrize("layer", [
    nn.Conv2d(4, 6, 3, stride=2, padding=1),
    nn.Conv2d(4, 6, 3, groups=2),
    nn.Conv1d(4, 4, 5, groups=4),
    nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1),
    nn.ConvTranspose2d(4, 6, (2, 3), groups=2),
    nn.Linear(9, 5),
], ids=str)  # fmt: skip
def test_multiplications_are_those_that_torch_counts(layer):
    sides = 1 if isinstance(layer, nn.Conv1d) else 2
    x = torch.randn(5, 4, *[9] * sides)
    with FlopCounterMode(display=False) as counter:
        output = layer(x)
    operations = operations_of(layer, x)
    assert operations == operations_of(layer, input=x)
    [(macs, outputs)] = operations.values()
    assert 5 * 2 * macs == counter.get_total_flops()
    assert 5 * outputs == output.numel()
    assert 5 * cost_of(operations, {}).flops == 5 * 2 * macs + output.numel()


class Tied(nn.Module):
    """A model whose head is an embedding's weight, with one layer in two places."""

    def __init__(self):
        super().__init__()
        self.words, self.never = nn.Embedding(12, 8), nn.Linear(5, 5)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.two.weight = self.one.weight
        self.head.weight = self.words.weight

    def forward(self, words, *, deep=True):
        x = self.one(self.words(words))
        return self.head(self.two(x) if deep else x)


def test_a_shared_weight_costs_what_all_its_places_do():
    model, words = Tied(), torch.zeros(3, 7, dtype=torch.long)
    assert operations_of(model, words) == {
        "words.weight": (7 * 96, 7 * 12),  # looking words up is free
        "never.weight": (0, 0),
        "one.weight": (14 * 64, 14 * 8),
    }
    found = operations_of(model, words=words, deep=False)
    assert found["one.weight"] == (7 * 64, 7 * 8)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("size", [8, 6])
def test_queries_and_what_they_attend_to_are_counted_each(by_name, size):
    model = nn.MultiheadAttention(8, 2, batch_first=True, kdim=size, vdim=size).eval()
    x, memory = torch.randn(3, 5, 8), torch.randn(3, 7, size)
    if by_name:
        found = operations_of(model, value=memory, query=x, key=memory)
    else:
        found = operations_of(model, x, memory, memory)
    with FlopCounterMode(display=False) as counter:
        model(x, memory, memory)
    products = 2 * 2 * 3 * 5 * 7 * 8
    expected = (counter.get_total_flops() - products) / 3 / 2
    assert sum(macs for macs, _ in found.values()) == pytest.approx(expected)
    assert found["out_proj.weight"] == (5 * 64, 5 * 8)
    if size != 8:
        of_each = [found[f"{name}_proj_weight"][0] for name in "qkv"]
        assert of_each == [5 * 64, 7 * 48, 7 * 48]


def test_packed_sequences_are_as_long_as_they_are():
    class Recurrent(nn.LSTM):
        def forward(self, x):
            return super().forward(nn.utils.rnn.pack_sequence([x[0, :6], x[1, :3]]))[0]

    model = Recurrent(4, 3, bidirectional=True)
    found = operations_of(model, torch.randn(2, 6, 4))
    assert [macs for macs, _ in found.values()] == [4.5 * 48, 4.5 * 36] * 2


def test_a_model_that_fails_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        operations_of(model, torch.zeros(1, 3))
    assert [module.training for module in model.modules()] == [True, True, False]
    assert not model[0]._forward_hooks
