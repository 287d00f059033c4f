"""One backward pass gives ``.grad`` and the factors of every sample's gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from support.per_sample_grad.agreement import answers, assert_same_grads
from support.per_sample_grad.gradient_oracle import error, flat, fold, oracle
from support.per_sample_grad.layer_cases import CASES
from support.per_sample_grad.refused_models import Turned
from torch import nn

import per_sample_grad as psg
import xla_replica


@pytest.mark.parametrize("accumulate", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
def test_grad_is_that_of_an_ordinary_pass_to_the_bit(case, accumulate):
    model, inputs = case.make(torch.float64)
    plain = copy.deepcopy(model)
    reduce = torch.mean if accumulate == "mean" else torch.sum
    for _ in range(2):  # the second pass adds to the first
        reduce(case.loss(plain, *inputs)).backward()
        with psg.capture(model, **case.options) as recorded:
            losses = case.loss(model, *inputs)
        factors = recorded.backward(losses, accumulate=accumulate)
    assert_same_grads(model, plain)
    truth = oracle(case, model, inputs)
    assert error(flat(factors.materialize()), flat(truth)) <= 1e-10


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def assert_accumulates(
    model: nn.Module, x: torch.Tensor, scale: float = 1.0, **options
) -> None:
    """Asserts that streams add to ``.grad`` what an ordinary pass does."""
    plain = copy.deepcopy(model)
    (scale * fold(plain, x).mean()).backward()
    for _ in range(2):
        model.zero_grad()
        with psg.capture(model, scale=scale, **options) as recorded:
            losses = fold(model, x)
        recorded.stream(losses, lambda f: f.norms(squared=True), accumulate="mean")
        assert_same_grads(model, plain)


@pytest.mark.parametrize("fallback", ["error", "loop"])
def test_streams_and_fallbacks_accumulate_once(fallback):
    x = torch.randn(4, 5)
    assert_accumulates(network(), x, fallback=fallback, check="always")
    assert_accumulates(network(), x, scale=2.0**6, fallback=fallback)
    if fallback != "error":  # nothing else accounts for it
        x = torch.randn(4, 3)
        assert_accumulates(Turned(), x, params=["angle"], fallback=fallback)


def test_a_frozen_parameter_stays_without_a_gradient():
    model, x = network(), torch.randn(4, 5)
    model[0].weight.requires_grad_(False)
    with psg.capture(model, ["2.weight"]) as recorded:
        losses = fold(model, x)
    factors = recorded.backward(losses, accumulate="mean")
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None  # it is trained, although not captured
    assert list(factors.shapes) == ["2.weight"]


def test_hooks_of_the_ordinary_pass_run():
    model, x, ran = network(), torch.randn(4, 5), []
    hook = xla_replica.AccumulationHook(lambda gradient: gradient * 0)
    model[0].weight.register_hook(hook)
    model[2].bias.register_post_accumulate_grad_hook(lambda p: ran.append(p.shape))
    with psg.capture(model) as recorded:
        losses = fold(model, x)
    norms = recorded.backward(losses, accumulate="mean").norms_by_parameter()
    assert (model[0].weight.grad == 0).all()
    assert (norms["0.weight"] > 0).all()
    assert ran == [(3,)]


def test_every_answer_is_that_of_the_samples_own_losses():
    """The pass is of the mean loss, times a scale, and its gradients are smaller."""
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    x, found = torch.randn(6, 2, 5, dtype=torch.float64), []
    vectors = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    weights = torch.arange(12.0).double().view(2, 6)
    for options, accumulate in (({}, None), ({"scale": 8.0}, "mean")):
        with psg.capture(model, **options) as recorded:
            losses = fold(model, x)
        factors = recorded.backward(losses, accumulate=accumulate)
        (bias,) = factors.contributions("3.bias")
        projected = factors.project(psg.Projection(vectors, 20))
        found.append([answers(factors, weights, vectors), bias.values, projected])
    torch.testing.assert_close(*found)
    crossed = psg.cross_gram(psg.per_sample_factors(model, fold, (x,)), factors)
    torch.testing.assert_close(crossed, found[0][0]["gram"])


def test_an_unknown_reduction_is_refused():
    with psg.capture(nn.Linear(2, 1)) as recorded:
        losses = fold(recorded.model, torch.ones(1, 2))
    with pytest.raises(ValueError, match="accumulate must be one of 'mean', 'sum'"):
        recorded.backward(losses, accumulate="max")
