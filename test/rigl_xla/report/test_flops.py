"""Operations and sizes are those of the published table of ResNet-50."""

from __future__ import annotations

import math

import pytest
import torch
from support.rigl_xla.resnet import RESNET50_WEIGHTS, resnet50

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


def resnet_costs(conv1_side: int = 224) -> dict[str, LayerCost]:
    """Returns costs; Google counts the first convolution at 230 pixels, with pads."""
    costs = {}
    for name, (shape, stride, side) in resnet50().items():
        side = conv1_side if name == "conv1.weight" else side
        costs[name] = LayerCost(shape, math.ceil(side / stride) ** 2)
    return costs


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
    costs, published = resnet_costs(), resnet_costs(230)
    assert size_in_bytes(costs, found) / 1e6 == pytest.approx(size, abs=1e-3)
    assert inference_ratio(costs, found) == pytest.approx(at_224, abs=1e-4)
    if at_230 is not None:
        assert inference_ratio(published, found) == pytest.approx(at_230, abs=1e-4)
        ratio = training_ratio(published, found, "rigl", delta=100)
        assert ratio == pytest.approx(training, abs=1e-4)
        assert 5 * ratio == pytest.approx(five_times, abs=1e-3)


def test_the_costs_of_the_model_are_those_that_were_counted():
    model = reference.resnet50()
    assert costs_of(model, torch.zeros(1, 3, 224, 224)) == resnet_costs()
    assert sum(p.numel() for p in model.parameters()) == 25_557_032


def test_dense_resnet50():
    costs = resnet_costs()
    assert inference_macs(costs) / 1e9 == pytest.approx(4.0892, abs=1e-4)
    assert inference_flops(costs) / 1e9 == pytest.approx(8.189, abs=1e-3)
    assert inference_flops(resnet_costs(230)) / 1e9 == pytest.approx(8.202, abs=1e-3)
    assert size_in_bytes(costs) / 1e6 == pytest.approx(102.122, abs=1e-3)
    assert costs["layer2.0.conv1.weight"].macs() == 102_760_448
    assert costs["conv1.weight"].macs() == 118_013_952
    cubes = [c.macs() for c in costs.values() if c.shape[2:] == (3, 3)]
    assert set(cubes) == {115_605_504}


@pytest.mark.parametrize(("sparsity", "published"), [(0.8, 0.61), (0.9, 0.50)])
def test_snfs_costs_what_was_published(sparsity, published):
    found = allocate(RESNET50_WEIGHTS, sparsity, "erk")
    ratio = training_ratio(resnet_costs(230), found, "snfs")
    assert ratio == pytest.approx({0.8: 0.6102, 0.9: 0.4954}[sparsity], abs=1e-4)
    assert round(ratio, 2) == published


@pytest.mark.parametrize(
    ("sparsity", "published", "of_33", "of_32"),
    [(0.8, 0.56, 0.5603, 0.5707), (0.9, 0.51, 0.5053, 0.5171)],
)
def test_gradual_pruning_costs_what_was_published(sparsity, published, of_33, of_32):
    found, costs = allocate(RESNET50_WEIGHTS, sparsity), resnet_costs(230)

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
GRADUAL = {"begin": 0, "end": 10, "delta": 2, "num_steps": 12}


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
    ],
)
def test_costs_that_mean_nothing_are_refused(cost, error, says):
    with pytest.raises(error, match=says):
        cost()


@pytest.mark.parametrize(
    "given", [{"begin": -1}, {"end": 0}, {"delta": 0}, {"num_steps": 0}]
)
def test_the_steps_of_gradual_pruning_are_checked(given):
    [name] = given
    with pytest.raises(ValueError, match=f"{name} must be an integer >= "):
        gradual_training_ratio(FC, {"fc": 0.5}, **GRADUAL | given)
