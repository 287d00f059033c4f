"""Projections straight from a backward pass are those of factors."""

from __future__ import annotations

import pytest
import torch
from support.per_sample_grad.gradient_oracle import fold
from support.per_sample_grad.layer_cases import CASES
from torch import nn

import per_sample_grad as psg


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("share", "dtype"), [(0.3, torch.float64), (1, torch.float32)], ids=str
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
def test_projections_are_those_of_factors(case, share, dtype):
    model, inputs = case.make(dtype)
    case.loss(model, *inputs).mean().backward()
    ordinary = [p.grad for p in model.parameters()]
    parameters = parameters_of(model)
    total = sum(p.numel() for p in parameters.values())
    size = max(len(parameters), int(share * total))
    projection = psg.Projection(parameters, size, seed=3)
    answers = []
    # The first one is compared, and takes what rules return.
    for _ in range(2):
        model.zero_grad()
        with psg.capture(model, **case.options) as recorded:
            losses = case.loss(model, *inputs)
        answers.append(recorded.project(losses, projection, accumulate="mean"))
        for param, grad in zip(model.parameters(), ordinary):
            assert (param.grad is None) == (grad is None)
            assert grad is None or param.grad.equal(grad)
    with psg.capture(model, **case.options) as recorded:
        losses = case.loss(model, *inputs)
    found = recorded.backward(losses).project(projection)
    expected = torch.cat([found[name].double() for name in parameters], 1)
    bound = 1e-10 if dtype == torch.float64 else 2e-5
    for answer in answers:
        assert answer.shape == (len(losses), projection.size)
        difference = (answer.double() - expected).norm()
        assert difference <= bound * expected.norm() + 1e-30


def several_layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Flatten(2), nn.LayerNorm(64), nn.Linear(64, 32), nn.Flatten(),
        nn.Linear(512, 5),
    )  # fmt: skip


@pytest.mark.parametrize("accumulate", ["mean", None])
def test_the_budget_does_not_change_the_numbers(accumulate):
    model, x = several_layers().double(), torch.randn(5, 3, 8, 8, dtype=torch.float64)
    projection, answers = psg.Projection(parameters_of(model), 400), []
    for budget in (None, None, 1, 2**12, 2**30):
        with psg.capture(model, budget=budget) as recorded:
            losses = fold(model, x)
        answers.append(recorded.project(losses, projection, accumulate=accumulate))
    for answer in answers[1:]:
        assert torch.allclose(answer, answers[0], rtol=1e-9, atol=1e-12)


def test_a_layers_settings_may_change_between_captures():
    layer = nn.Conv2d(2, 4, 3, padding=1).double()
    model, x = nn.Sequential(layer, nn.Flatten()), torch.randn(3, 2, 7, 7).double()
    projection = psg.Projection(parameters_of(model), 30)
    for padding in ((1, 1), (1, 1), (2, 0), (2, 0), (1, 1)):
        layer.padding = padding
        with psg.capture(model) as recorded:
            losses = model(x).square().sum(1)
        found = recorded.project(losses, projection, retain_graph=True)
        with psg.capture(model) as recorded:
            losses = model(x).square().sum(1)
        factors = recorded.backward(losses).project(projection)
        expected = torch.cat([factors[name] for name in projection.shapes], 1)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_layer_whose_weight_is_its_bias_is_written_once():
    norm = nn.LayerNorm(20).double()
    norm.bias = norm.weight
    model, answers = nn.Sequential(norm, nn.Flatten()), []
    x = torch.randn(3, 7, 20, dtype=torch.float64, requires_grad=True)
    projection = psg.Projection(parameters_of(model), 9)
    for _ in range(2):  # the first one is compared
        with psg.capture(model) as recorded:
            losses = model(x).sin().sum(1)
        answers.append(recorded.project(losses, projection))
    torch.testing.assert_close(*answers, rtol=1e-9, atol=1e-12)


def test_losses_of_few_digits_do_not_round_projections():
    model, x = several_layers(), torch.randn(4, 3, 8, 8)
    projection, answers = psg.Projection(parameters_of(model), 400), []
    # The first of either dtype is compared.
    for dtype in [torch.float32] * 2 + [torch.bfloat16] * 2:
        with psg.capture(model) as recorded:
            losses = model(x).sum(1).to(dtype)
        answers.append(recorded.project(losses, projection, accumulate="sum"))
    assert {answer.dtype for answer in answers} == {torch.float32}
    torch.testing.assert_close(answers[3], answers[1])


def test_frozen_weights_and_biases_are_left_out():
    for frozen in ("weight", "bias"):
        model = several_layers().double()
        for name, param in model.named_parameters():
            param.requires_grad_(not name.endswith(frozen))
        kept = {n: p for n, p in model.named_parameters() if p.requires_grad}
        projection, answers = psg.Projection(kept, 60), []
        for _ in range(2):
            with psg.capture(model) as recorded:
                losses = fold(model, torch.ones(4, 3, 8, 8, dtype=torch.float64))
            answers.append(recorded.project(losses, projection))
        assert torch.allclose(*answers, rtol=1e-9, atol=1e-12)


def test_columns_follow_the_projection_and_not_the_model():
    model = nn.Linear(3, 2).double()
    given = dict(reversed(parameters_of(model).items()))
    projection = psg.Projection(given, 8)
    for _ in range(2):
        with psg.capture(model) as recorded:
            losses = fold(model, torch.eye(3, dtype=torch.float64))
        found = recorded.project(losses, projection, retain_graph=True)
        expected = torch.autograd.grad(losses[1], [model.bias, model.weight])
        assert torch.allclose(found[1], torch.cat([g.flatten() for g in expected]))


def test_another_models_projection_is_refused():
    model = nn.Linear(2, 2)
    with psg.capture(model) as recorded:
        losses = fold(model, torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"weight of shape \(2, 2\) is captured"):
        recorded.project(losses, psg.Projection({"weight": (3, 2), "bias": (2,)}, 5))
