"""Sketches from factors equal sketches of gradients, and keep inner products."""

from __future__ import annotations

import pytest
import torch
from support.per_sample_grad.gradient_oracle import error, fold, oracle
from support.per_sample_grad.layer_cases import CASES
from torch import nn

import per_sample_grad as psg
from per_sample_grad.factors.forms import Dense
from per_sample_grad.factors.tensor_sketch import sketch
from xla_replica import DeviceTraits

SIZE = 11


def by_hand(gradients: dict[str, torch.Tensor], size: int, seed: int) -> torch.Tensor:
    """Returns the sketch entry by entry, from where impulses go."""
    total = torch.zeros(len(next(iter(gradients.values()))), size).double()
    for name, values in gradients.items():
        shape = tuple(values.shape[1:])
        count = values[0].numel()
        impulses = torch.eye(count, dtype=torch.float64).reshape(count, *shape)
        places = sketch([(name, shape, [Dense(impulses)])], size, seed, 2**30)
        assert places is not None
        total += values.flatten(1) @ places
    return total


@pytest.mark.parametrize("budget", [1, 2**30])
@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.name.startswith("conv3d")], ids=lambda c: c.name
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
def test_a_sketch_is_a_linear_map_of_the_gradient(case, budget):
    model, inputs = case.make(torch.float64)
    truth = oracle(case, model, inputs)
    factors = psg.per_sample_factors(
        model, case.loss, inputs, budget=budget, **case.options
    )
    assert error(factors.sketch(SIZE, seed=3), by_hand(truth, SIZE, 3)) <= 1e-10


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_an_entry_goes_to_one_place_with_a_sign(size):
    impulses = torch.eye(12, dtype=torch.float64).reshape(12, 3, 4)
    places = sketch([("w", (3, 4), [Dense(impulses)])], size, 0, 2**30)
    assert places is not None
    ones = places.abs().round()
    torch.testing.assert_close(places.abs(), ones, atol=1e-12, rtol=0)
    assert torch.equal(ones.sum(1), torch.ones(12).double())


def test_inner_products_are_kept_in_expectation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    factors = psg.per_sample_factors(model, fold, (x,))
    grams = torch.stack(
        [s @ s.T for s in (factors.sketch(16, seed=seed) for seed in range(400))]
    )
    truth = factors.gram()
    scale = truth.diagonal().mean()
    assert (grams.mean(0) - truth).abs().max() < 0.1 * scale
    assert (grams - truth).abs().mean() > 0  # they are sketches


def test_sketches_of_different_parameters_do_not_collide_by_name():
    impulse = Dense(torch.ones(1, 8, dtype=torch.float64))
    a = sketch([("a", (8,), [impulse])], 64, 0, 2**30)
    b = sketch([("b", (8,), [impulse])], 64, 0, 2**30)
    assert a is not None
    assert b is not None
    assert not torch.equal(a, b)
    with pytest.raises(ValueError, match="size must be an integer >= 1, got 0"):
        psg.per_sample_factors(nn.Linear(2, 2), fold, (torch.ones(1, 2),)).sketch(0)


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize("budget", [1, 2**20])
def test_a_lazy_device_transforms_back_by_products(monkeypatch, size, budget):
    """Runs on the CPU what runs on a lazy device."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    factors = psg.per_sample_factors(model, fold, (x,), budget=budget)
    expected = factors.sketch(size)
    monkeypatch.setattr(
        "per_sample_grad.factors.tensor_sketch.traits",
        lambda _: DeviceTraits(is_lazy=True),
    )
    torch.testing.assert_close(factors.sketch(size), expected)
