"""Coverage reports, plans, losses per sample and one-shot functions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.gradient_oracle import (
    Case,
    deviations,
    error,
    flat,
    fold,
    oracle,
)
from support.per_sample_grad.refused_models import BY_NAME
from torch import nn

import per_sample_grad as psg
from xla_replica import DeviceTraits
from xla_replica.device import device_traits


def report_of(name: str) -> psg.Coverage:
    model, inputs = BY_NAME[name].make(torch.float32)
    return psg.coverage(model, fold, inputs)


def test_coverage_names_what_is_missing_and_what_is_wrong():
    report = report_of("functional-use")
    assert report.complete
    assert "coverage is complete" in str(report)
    found = report.parameters["inner.weight"]
    assert found.error < 1e-5
    assert found.uses == ("Linear 'inner'", "Mm in Linear 'inner'")
    report = report_of("turned")
    assert not report.complete
    found = report.parameters["p"]
    assert found.problems == (
        "1 use(s) outside any module with a rule (no rule is registered for "
        "WithParameter; PolarBackward0 mixes it with samples, and has no rule)",
    )
    assert found.correct  # the loop's answer
    assert not report.parameters["inner.bias"].problems
    assert "needs a fallback" in str(report)
    report = report_of("coupled-square")
    assert not report.complete
    assert not report.parameters["inner.weight"].correct
    assert "WRONG" in str(report)


def factors_of(positions: int, width: int, samples: int = 4, **options) -> psg.Factors:
    model = nn.Linear(width, width)
    x = torch.randn(samples, positions, width)
    return psg.per_sample_factors(model, fold, (x,), **options)


def test_the_plan_follows_the_shapes():
    short, long = factors_of(2, 64), factors_of(64, 8)
    # With several positions, many samples' Gram matrix is cheaper from gradients.
    many = factors_of(16, 32, samples=64)
    for factors, quantity, form in (
        (short, "norms", "factored"), (long, "norms", "materialized"),
        (many, "norms", "factored"), (many, "gram", "materialized"),
    ):  # fmt: skip
        assert factors.plan(quantity).choices["weight"].form == form
    assert long.plan("norms").choices["bias"].form == "dense"
    assert "Mflop" in str(many.plan("gram"))
    with pytest.raises(ValueError, match="one of 'norms', 'gram', got"):
        short.plan("sum")


@pytest.mark.parametrize("entries", [11, 1000])
@pytest.mark.parametrize("quantity", ["norms", "gram"])
def test_the_plan_takes_and_shows_the_lowest_cost(entries, quantity):
    """More operations may take less time, where fewer numbers are written."""
    model, ids = nn.Embedding(entries, 8), torch.randint(0, entries, (32, 5))
    plan, *forms = (
        psg.per_sample_factors(model, fold, (ids,), method=method).plan(quantity)
        for method in ("auto", "factored", "materialized")
    )
    choices = [form.choices["weight"] for form in forms]
    chosen = plan.choices["weight"]
    assert chosen == min(choices, key=lambda choice: choice.cost)
    assert all(choice.cost > choice.flops for choice in choices)
    assert f"like {chosen.cost / 1e6:.3f}" in str(plan)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_token_cross_entropy_is_each_samples_own(reduction, weighted):
    logits, targets = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5))
    targets[1, 2:] = -100
    options = {"reduction": reduction, "label_smoothing": 0.1}
    if weighted:
        options["weight"] = torch.rand(7)
    found = psg.token_cross_entropy(logits, targets, **options)
    expected = [F.cross_entropy(x, y, **options) for x, y in zip(logits, targets)]
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_sample_without_tokens_has_no_loss():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    targets = torch.tensor([[1, 2, 3], [-1, -1, -1]])
    losses = psg.token_cross_entropy(logits, targets, ignore_index=-1)
    assert losses[1] == 0
    losses.sum().backward()
    assert torch.equal(logits.grad[1], torch.zeros(3, 4))
    with pytest.raises(ValueError, match="classes last"):
        psg.token_cross_entropy(logits.mT, targets)
    with pytest.raises(ValueError, match="'mean', 'sum', got 'none'"):
        psg.token_cross_entropy(logits, targets, reduction="none")


def test_one_shot_functions_agree_with_the_loop():
    model, inputs = BY_NAME["cnn"].make(torch.float64)
    truth = oracle(BY_NAME["cnn"], model, inputs)
    grads, call = flat(truth), (model, fold, inputs)
    assert error(flat(psg.per_sample_grads(*call)), grads) <= 1e-10
    assert error(psg.per_sample_grad_norms(*call), grads.norm(dim=1)) <= 1e-10
    assert error(psg.per_sample_gram(*call), grads @ grads.T) <= 1e-10
    vectors = {name: values[0] for name, values in truth.items()}
    assert error(psg.per_sample_grad_dot(*call, vectors), grads @ grads[0]) <= 1e-10
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    found = [g[None] for g in psg.weighted_grad(*call, weights).values()]
    assert error(flat(found), weights @ grads) <= 1e-10


def test_cross_gram_of_batches_of_different_sizes():
    case = BY_NAME["tied-embedding-head"]
    model, inputs = case.make(torch.float64, batch=3)
    _, others = case.make(torch.float64, batch=5, seed=1)
    a = psg.per_sample_factors(model, fold, inputs)
    b = psg.per_sample_factors(model, fold, others)
    expected = flat(oracle(case, model, inputs)) @ flat(oracle(case, model, others)).T
    assert error(psg.cross_gram(a, b), expected) <= 1e-10
    assert error(psg.cross_gram(b, a), expected.T) <= 1e-10
    with pytest.raises(ValueError, match="different parameters"):
        psg.cross_gram(a, factors_of(2, 4))


def test_vectors_and_weights_are_checked():
    factors = factors_of(2, 3)
    with pytest.raises(ValueError, match="bias must be both given and captured"):
        factors.dot({"weight": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match="parameters' shapes"):
        factors.dot({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    with pytest.raises(ValueError, match="4 samples"):
        factors.weighted_sum(torch.zeros(5))


@pytest.mark.parametrize("changed", ["input", "answer"])
def test_no_answer_is_of_a_tensor_that_was_changed_in_place(changed):
    model, x = nn.Linear(2, 3), torch.randn(4, 2)
    factors, other = (psg.per_sample_factors(model, fold, (x,)) for x in (x, x.clone()))
    projection = psg.Projection(factors.shapes, 2)
    (x if changed == "input" else factors.materialize()["bias"]).mul_(2)
    for answer in (
        factors.norms, factors.norms_by_parameter, factors.gram, factors.materialize,
        lambda: factors.dot(dict(model.named_parameters())),
        lambda: factors.weighted_sum(torch.ones(4)),
        lambda: factors.project(projection), lambda: factors.contributions("weight"),
        lambda: factors.cross_gram(other), lambda: other.cross_gram(factors),
    ):  # fmt: skip
        with pytest.raises(psg.PerSampleError, match="Ask for all answers before"):
            answer()
    assert other.norms().shape == (4,)


@pytest.mark.parametrize("is_image", [True, False])
def test_windows_and_rows_of_tables_cancel_too(is_image):
    """Inputs are almost the same everywhere, and gradients add up to zero."""
    torch.manual_seed(0)
    model, x = nn.Embedding(9, 64), torch.arange(4)[:, None].expand(4, 3)
    if is_image:
        x = torch.randn(4, 40, 1, 1) + 1e-4 * torch.randn(4, 40, 5, 5)
        model = nn.Conv2d(40, 40, 3)

    def losses_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x).flatten(2) if is_image else model(x).transpose(1, 2)
        signs = torch.cos(torch.arange(float(out.shape[2]))).to(out.dtype)
        return (out * (signs - signs.mean())).sum((1, 2)) * 100

    found = psg.per_sample_grad_norms(model, losses_of, (x,), params=["weight"])
    wide = (model.double(), losses_of, (x.double() if is_image else x,))
    options = {"params": ["weight"], "method": "materialized"}
    expected = psg.per_sample_grad_norms(*wide, **options)
    allowed = 2e-3 * expected if is_image else 1e-2
    assert ((found - expected).abs() <= allowed).all()


@pytest.mark.parametrize(("width", "positions"), [(1024, 128), (512, 16)])
def test_norms_are_right_where_positions_cancel(width, positions):
    """From factors they would be off by about 1 per cent."""
    torch.manual_seed(0)
    model, samples = nn.Linear(width, width), 2
    x = 1 + 1e-3 * torch.randn(samples, positions, width)
    options = {"check": "never", "params": ["weight"]}

    def off(m: nn.Module, x: torch.Tensor, **more: object) -> list[torch.Tensor]:
        factors = psg.per_sample_factors(m, deviations, (x,), **options, **more)
        norms = psg.per_sample_grad_norms(m, deviations, (x,), **options, **more)
        return [factors.norms(), factors.gram(), factors.cross_gram(factors), norms]

    exact = off(copy.deepcopy(model).double(), x.double(), method="materialized")
    wrong = off(model, x, method="factored")
    for found, rough, truth in zip(off(model, x), wrong, exact):
        # The gradients of activations have lost digits themselves.
        assert error(found, truth) <= 1e-4
        assert error(rough, truth) > 3e-3
    factors = psg.per_sample_factors(model, deviations, (x,), **options)
    assert factors.plan("norms").choices["weight"].form == "materialized"
    plain = psg.per_sample_factors(model, fold, (torch.randn_like(x),), **options)
    assert plain.plan("norms").choices["weight"].form == "factored"


def test_where_reading_waits_the_first_pass_tells_later_ones_what_cancels(monkeypatch):
    """As on a GPU, which the second pass does not read."""
    monkeypatch.setitem(device_traits._TRAITS, "cpu", DeviceTraits())
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    wide = copy.deepcopy(model).double()
    for _ in range(3):
        x = 1 + 1e-3 * torch.randn(3, 16, 64)
        truth = flat(oracle(Case("", None, (), loss=deviations), wide, (x,)))
        factors = psg.per_sample_factors(model, deviations, (x,))
        assert error(factors.norms(), truth.norm(dim=1)) < 1e-3
        assert error(factors.gram(), truth @ truth.T) < 1e-3


def test_the_functional_style_gives_the_same():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(5, 3), torch.randint(0, 2, (5,))
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params: dict, buffers: dict, x: torch.Tensor, y: torch.Tensor):
        out = torch.func.functional_call(model, (params, buffers), (x.unsqueeze(0),))
        return F.cross_entropy(out, y.unsqueeze(0))

    def losses_of(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(x), y, reduction="none")

    grads, losses = psg.vectorized_grads(loss, params, {}, x, y, chunk_size=2)
    torch.testing.assert_close(losses, losses_of(model, x, y).detach())
    expected = psg.per_sample_grads(model, losses_of, (x, y))
    for name in params:
        torch.testing.assert_close(grads[name], expected[name])
