"""Operations and sizes are those of the published table of ResNet-50."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from support.rigl_xla.resnet import RESNET50_WEIGHTS
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.flop_counter import FlopCounterMode

from rigl_xla import (
    LayerCost,
    allocate,
    costs_of,
    gradual_training_ratio,
    inference_flops,
    inference_macs,
    inference_ratio,
    size_in_bytes,
    training_ratio,
)
from rigl_xla.topology.update_schedule import gradual_sparsity
from tools.references import resnet50 as reference


@functools.cache
def resnet_costs(conv1_side: int = 112) -> dict[str, LayerCost]:
    """Returns costs; Google counts the first convolution at 115 pixels, with pads."""
    costs = costs_of(reference.resnet50(), torch.zeros(1, 3, 224, 224))
    first = dataclasses.replace(costs["conv1.weight"], positions=conv1_side**2)
    return costs | {"conv1.weight": first}


# sparsity, distribution, conv1 dense: size in MB, inference counted at 224 and at 230
# pixels, RigL training and five times longer training at 230
TABLE = {
    (0.8, "erk", False): (23.684, 0.4146, 0.4153, 0.4172, 2.086),
    (0.8, "uniform", True): (23.729, 0.2241, 0.2254, 0.2279, 1.140),
    (0.9, "erk", False): (13.499, 0.2429, 0.2431, 0.2456, 1.228),
    (0.9, "uniform", True): (13.532, 0.1272, 0.1285, 0.1314, 0.657),
    (0.95, "erk", False): (8.399, 0.1229, 0.1230, 0.1259, 0.630),
    (0.95, "uniform", True): (8.433, 0.0787, 0.0801, 0.0831, 0.416),
    (0.965, "uniform", True): (6.904, 0.0641, 0.0656, 0.0687, 0.343),
    (0.965, "erk", False): (6.869, 0.0864, None, None, None),
    (0.965, "erk", True): (6.904, 0.1111, 0.1125, 0.1154, 0.577),
    (0.99, "erk", True): (4.354, 0.0533, 0.0548, 0.0579, 0.290),
}


@pytest.mark.parametrize("row", TABLE)
def test_resnet50_costs_what_was_published(row):
    sparsity, distribution, dense_first = row
    size, at_224, at_230, training, five_times = TABLE[row]
    found = allocate(RESNET50_WEIGHTS, sparsity, distribution, dense_first=dense_first)
    costs, published = resnet_costs(), resnet_costs(115)
    assert size_in_bytes(costs, found) / 1e6 == pytest.approx(size, abs=1e-3)
    assert inference_ratio(costs, found) == pytest.approx(at_224, abs=1e-4)
    if at_230 is not None:
        assert inference_ratio(published, found) == pytest.approx(at_230, abs=1e-4)
        ratio = training_ratio(published, found, "rigl", delta=100)
        assert ratio == pytest.approx(training, abs=1e-4)
        assert 5 * ratio == pytest.approx(five_times, abs=1e-3)


def test_dense_resnet50():
    costs = resnet_costs()
    assert inference_macs(costs) / 1e9 == pytest.approx(4.0892, abs=1e-4)
    assert inference_flops(costs) / 1e9 == pytest.approx(8.189, abs=1e-3)
    assert inference_flops(resnet_costs(115)) / 1e9 == pytest.approx(8.202, abs=1e-3)
    assert size_in_bytes(costs) / 1e6 == pytest.approx(102.122, abs=1e-3)
    assert {name: cost.shape for name, cost in costs.items()} == RESNET50_WEIGHTS
    parameters = reference.resnet50().parameters()
    assert sum(p.numel() for p in parameters) == 25_557_032
    assert costs["layer2.0.conv1.weight"].macs() == 102_760_448
    assert costs["conv1.weight"].macs() == 118_013_952
    cubes = [c.macs() for c in costs.values() if c.shape[2:] == (3, 3)]
    assert set(cubes) == {115_605_504}


@pytest.mark.parametrize(("sparsity", "published"), [(0.8, 0.61), (0.9, 0.50)])
def test_snfs_costs_what_was_published(sparsity, published):
    found = allocate(RESNET50_WEIGHTS, sparsity, "erk")
    ratio = training_ratio(resnet_costs(115), found, "snfs")
    assert ratio == pytest.approx({0.8: 0.6102, 0.9: 0.4954}[sparsity], abs=1e-4)
    assert round(ratio, 2) == published


@pytest.mark.parametrize(
    ("sparsity", "published", "of_33", "of_32"),
    [(0.8, 0.56, 0.5603, 0.5707), (0.9, 0.51, 0.5053, 0.5171)],
)
def test_gradual_pruning_costs_what_was_published(sparsity, published, of_33, of_32):
    found, costs = allocate(RESNET50_WEIGHTS, sparsity), resnet_costs(115)

    def ratio_at(step: int) -> float:
        now = {n: gradual_sparsity(step, s, 10_000, 25_000) for n, s in found.items()}
        return inference_ratio(costs, now)

    # The authors average 33 readings, both ends included; masks change 32 times.
    readings = [ratio_at(step) for step in range(0, 33_000, 1_000)]
    assert sum(readings) / 33 == pytest.approx(of_33, abs=1e-4)
    assert round(sum(readings) / 33, 2) == published
    ratio = gradual_training_ratio(costs, found, 10_000, 25_000, 1_000, 32_000)
    assert ratio == pytest.approx(sum(readings[:-1]) / 32)
    assert ratio == pytest.approx(of_32, abs=1e-4)


def test_methods_that_never_see_a_dense_gradient_train_at_the_cost_of_inference():
    costs = {"a": LayerCost((10, 20), 3), "b": LayerCost((4, 5))}
    sparsities = {"a": 0.5}
    for method in ("static", "set"):
        ratio = training_ratio(costs, sparsities, method)
        assert ratio == inference_ratio(costs, sparsities)
    assert training_ratio(costs, sparsities, "dense") == 1
    with pytest.raises(ValueError, match="gradual_training_ratio for 'gmp'"):
        training_ratio(costs, sparsities, "gmp")


FC = {"fc": LayerCost((10, 100))}
ONE, NONE = nn.Linear(2, 2), "the first tensor of it counts samples"


def gradual(begin=0, end=10, delta=2, num_steps=12):
    """Returns what computes the cost of gradual pruning."""
    return lambda: gradual_training_ratio(FC, {"fc": 0.5}, begin, end, delta, num_steps)


@pytest.mark.parametrize(
    ("cost", "error", "says"),
    [
        (lambda: LayerCost((10, -1)), ValueError, "of shape must be an integer >= 0"),
        (lambda: LayerCost(()), ValueError, r"must be \(out, in, \*kernel\), got \(\)"),
        (lambda: LayerCost("ab"), TypeError, "a tuple of integers, got 'ab'"),
        (lambda: LayerCost((2, 2), -1), ValueError, "positions must be .* >= 0, got"),
        (lambda: LayerCost((2, 2), math.nan), ValueError, "positions must be a finite"),
        (lambda: LayerCost((2, 2), 1, 0.5), TypeError, "out_channels must be"),
        (lambda: LayerCost((2, 2), 1, 2, -1), ValueError, "output_positions must be"),
        (lambda: inference_macs({"fc": 3}), TypeError, "'fc' must be a LayerCost"),
        (lambda: inference_flops(3), TypeError, "costs must be a dict of LayerCost"),
        (lambda: inference_flops(FC, {"f": 0.5}), ValueError, r"a cost, \['fc'\]"),
        (lambda: size_in_bytes(FC, {"fc": 2}), ValueError, ">= 0 and <= 1, got 2"),
        (lambda: size_in_bytes(FC, [0.5]), TypeError, "sparsities must be a dict"),
        (lambda: inference_ratio({}, {}), ValueError, "compute nothing, so no ratio"),
        (lambda: training_ratio(FC, {}, delta=0), ValueError, "delta must be"),
        (lambda: training_ratio(FC, {}, num_collected=101), ValueError, "<= 100, got"),
        (gradual(begin=-1), ValueError, "begin must be an integer >= "),
        (gradual(end=0), ValueError, "end must be an integer >= "),
        (gradual(delta=0), ValueError, "delta must be an integer >= "),
        (gradual(num_steps=0), ValueError, "num_steps must be an integer >= "),
        (lambda: costs_of(ONE), ValueError, NONE),
        (lambda: costs_of(ONE, torch.ones(0, 2)), ValueError, NONE),
        (lambda: costs_of(3, torch.ones(1, 2)), TypeError, r"a torch module, got 3 \("),
    ],
)
def test_costs_that_mean_nothing_are_refused(cost, error, says):
    with pytest.raises(error, match=says):
        cost()


CONVOLUTIONS = {
    "strided": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "grouped": nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": nn.Conv1d(4, 4, 5, groups=4),
    "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1),
    "transposed grouped": nn.ConvTranspose2d(4, 6, (2, 3), groups=2),
    "linear": nn.Linear(9, 5),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_multiplications_are_those_that_torch_counts(kind):
    layer = CONVOLUTIONS[kind]
    sides = 1 if isinstance(layer, nn.Conv1d) else 2
    x = torch.randn(5, 4, *[9] * sides)
    with FlopCounterMode(display=False) as counter:
        output = layer(x)
    [cost] = costs_of(layer, x).values()
    assert 5 * 2 * cost.macs() == counter.get_total_flops()
    assert 5 * cost.num_outputs == output.numel()
    assert cost.num_biases == layer.bias.numel()
    costs = {"layer": cost}
    assert 5 * inference_flops(costs) == counter.get_total_flops() + output.numel()
    stored = layer.weight.numel() + layer.bias.numel()
    assert size_in_bytes(costs) == 4 * stored


class Tied(nn.Module):
    """A model whose head is an embedding's weight, with one layer in two places."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.never = nn.Linear(5, 5)
        self.two.weight = self.one.weight
        self.head.weight = self.words.weight

    def forward(self, words, *, deep=True):
        x = self.one(self.words(words))
        return self.head(self.two(x) if deep else x)


def test_a_shared_weight_costs_what_all_its_places_do():
    costs = costs_of(Tied(), torch.zeros(3, 7, dtype=torch.long))
    assert costs == {
        "one.weight": LayerCost((8, 8), 14),
        "words.weight": LayerCost((12, 8), 7),  # looking words up is free
        "never.weight": LayerCost((5, 5), 0),
    }
    model = Tied()
    costs = costs_of(model, words=torch.zeros(3, 7, dtype=torch.long), deep=False)
    assert costs["one.weight"] == LayerCost((8, 8), 7)
    assert not any(module._forward_hooks for module in model.modules())


class Attends(nn.Module):
    def __init__(self, by_name, **sizes):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)
        self.by_name = by_name

    def forward(self, x, memory):
        if self.by_name:
            return self.inner(value=memory, query=x, key=memory)[0]
        return self.inner(x, memory, memory)[0]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("size", [8, 6])
def test_queries_and_what_they_attend_to_are_counted_each(by_name, size):
    """Products of queries, keys and values are left out of torch's count."""
    model = Attends(by_name, kdim=size, vdim=size).eval()
    x, memory = torch.randn(3, 5, 8), torch.randn(3, 7, size)
    costs = costs_of(model, x, memory)
    with FlopCounterMode(display=False) as counter:
        model(x, memory)
    products = 2 * 2 * 3 * 5 * 7 * 8
    expected = (counter.get_total_flops() - products) / 3 / 2
    assert inference_macs(costs) == pytest.approx(expected)
    assert costs["inner.out_proj.weight"].positions == 5
    if size != 8:
        assert costs["inner.q_proj_weight"].positions == 5
        assert costs["inner.k_proj_weight"].positions == 7
        assert costs["inner.v_proj_weight"].positions == 7


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(4, 3, bidirectional=True)

    def forward(self, x):
        lengths = [6, 3]
        packed = pack_sequence([x[i, :n] for i, n in enumerate(lengths)])
        return self.inner(input=packed)[0].data


def test_packed_sequences_are_as_long_as_they_are():
    costs = costs_of(Recurrent(), torch.randn(2, 6, 4))
    assert {cost.positions for cost in costs.values()} == {4.5}
    assert len(costs) == 4


def test_a_model_that_fails_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        costs_of(model, torch.zeros(1, 3))
    assert model.training
    assert not model[0]._forward_hooks
    assert torch.backends.mha.get_fastpath_enabled()
