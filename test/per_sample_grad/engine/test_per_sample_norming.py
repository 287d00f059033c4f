"""Norms straight from a backward pass are those of factors."""

from __future__ import annotations

import pytest
import torch
from support.per_sample_grad.gradient_oracle import fold, oracle
from support.per_sample_grad.layer_cases import CASES, Apply
from torch import nn

import per_sample_grad as psg
from per_sample_grad.factors import loops
from per_sample_grad.layers import norming, summing
from xla_replica.common.compiling import has_numba


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
def test_norms_are_those_of_single_samples(case, dtype):
    model, inputs = case.make(dtype)
    truth = oracle(case, model, inputs).values()
    expected = torch.cat([grad.flatten(1) for grad in truth], 1).norm(dim=1)
    case.loss(model, *inputs).sum().backward()
    ordinary = [p.grad for p in model.parameters()]
    bound = 1e-10 if dtype == torch.float64 else 1e-4
    # The first one is compared, and takes what rules return.
    for accumulate in (None, None, "mean", "sum"):
        model.zero_grad()
        with psg.capture(model, **case.options) as recorded:
            losses = case.loss(model, *inputs)
        found = recorded.norms(losses, accumulate=accumulate)
        assert found.shape == losses.shape
        assert torch.allclose(found.double(), expected, rtol=bound, atol=1e-12)
        for param, grad in zip(model.parameters(), ordinary):
            assert (param.grad is None) == (accumulate is None or grad is None)
            if accumulate == "sum" and grad is not None:
                torch.testing.assert_close(param.grad, grad)


def several_layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16).eval(), nn.ReLU(),
        nn.Conv2d(16, 8, 1, bias=False), nn.Conv2d(8, 8, 3, groups=8),
        nn.Flatten(2), nn.LayerNorm(196), nn.Linear(196, 32), nn.Flatten(),
        nn.Linear(256, 5),
    )  # fmt: skip


def norms(model: nn.Module, x: torch.Tensor, **options: object) -> torch.Tensor:
    return psg.per_sample_grad_norms(model, fold, (x,), **options)


def test_no_factors_are_made_after_the_comparison(monkeypatch):
    model, made, counts = several_layers(), [], []
    init = psg.Factors.__init__

    def counted(self, *args, **kwargs):
        made.append(1)
        init(self, *args, **kwargs)

    monkeypatch.setattr(psg.Factors, "__init__", counted)
    for _ in range(3):
        made.clear()
        norms(model, torch.randn(4, 3, 16, 16))
        counts.append(len(made))
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


def test_neither_chunks_nor_waiting_nor_forms_change_the_numbers(monkeypatch):
    model, x = several_layers(), torch.randn(5, 3, 16, 16)
    answers = [norms(model, x, method="materialized") for _ in range(2)]
    for waiting, budget in ((0, None), (2**20, 1), (20000, 2**16), (2**30, 2**30)):
        monkeypatch.setattr(norming.Norming, "waiting", waiting)
        answers.append(norms(model, x, budget=budget))
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_weights_and_biases_are_left_out(frozen):
    model, x = several_layers().double(), torch.randn(4, 3, 16, 16).double()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith(frozen))
    expected = psg.per_sample_factors(model, fold, (x,)).norms()
    torch.testing.assert_close(norms(model, x), expected)


LONG = {
    "tokens": (lambda: nn.Linear(96, 64), (12, 96)),
    "image": (lambda: nn.Conv2d(40, 40, 3), (40, 5, 5)),
    "large image": (lambda: nn.Conv2d(3, 4, 3), (3, 25, 25)),
    "ids": (lambda: nn.Embedding(9, 64), (3,)),
}


@pytest.mark.parametrize("name", LONG)
def test_positions_that_cancel_are_seen(name):
    """The positions' terms are as large as numbers are, and their sum is small."""
    (build, shape), is_image = LONG[name], name.endswith("image")
    torch.manual_seed(0)
    model = build()
    x = torch.randint(0, 9, (4, *shape)) if name == "ids" else torch.randn(4, *shape)
    if name == "ids":
        x[:] = x[:, :1]
    else:  # inputs that are almost the same everywhere, gradients that add up to zero
        first = x.flatten(2)[..., :1] if is_image else x[:, :1]
        x = (first.expand_as(x.flatten(2) if is_image else x)).reshape(x.shape)
        x = x + 1e-4 * torch.randn_like(x)

    def losses_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x).flatten(2) if is_image else model(x).transpose(1, 2)
        signs = torch.cos(torch.arange(out.shape[2] * 7.0)[: out.shape[2]])
        return (out * (signs - signs.mean()).to(out.dtype)).sum((1, 2)) * 100

    for _ in range(2):
        found = psg.per_sample_grad_norms(model, losses_of, (x,), params=["weight"])
    double = model.double()
    given = x if name == "ids" else x.double()
    expected = psg.per_sample_grad_norms(
        double, losses_of, (given,), params=["weight"], method="materialized"
    )
    if name == "ids":
        assert (found <= 1e-2).all()
        return
    assert ((found - expected).abs() <= 2e-3 * expected).all()


LOOPED = {
    "image": ("squares_of_convolution", nn.Conv2d(3, 5, 3, padding=1), (3, 22, 25)),
    "no padding": ("squares_of_convolution", nn.Conv2d(4, 8, 3), (4, 25, 25)),
    "much padding": (
        "squares_of_convolution",
        nn.Conv2d(1, 6, 3, padding=(0, 4), bias=False),
        (1, 35, 11),
    ),
    "reflected": (
        "squares_of_convolution",
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        (2, 23, 23),
    ),
    "stride": ("squares_of_convolution", nn.Conv2d(2, 3, 3, stride=2), (2, 47, 47)),
    "tokens": ("squares_by_positions", nn.Linear(11, 13), (6, 11)),
    "wide tokens": ("squares_by_positions", nn.Linear(1030, 30, bias=False), (5, 1030)),
    "norm": ("of_layer_norm", nn.LayerNorm(7), (5, 7)),
    "table": ("squares_of_table", nn.Embedding(6, 3, padding_idx=2), (9,)),
}


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_loops_find_what_torch_does(monkeypatch, name, frozen):
    function, layer, shape = LOOPED[name]
    layer = layer.double().requires_grad_()
    params = [n for n, _ in layer.named_parameters() if n != frozen]
    if not params:
        return
    x = torch.randn(3, *shape, dtype=torch.float64)
    if name == "table":
        x = torch.randint(0, 6, (3, *shape))
    model, answers, called = nn.Sequential(layer, nn.Tanh(), nn.Flatten()), [], []
    params = ["0." + each for each in params]
    loop = getattr(summing, function)
    monkeypatch.setattr(
        summing, function, lambda *given: called.append(1) or loop(*given)
    )
    for numba in (True, True, False):  # the first one is compared
        if not numba:
            monkeypatch.setattr(loops, "has_numba", lambda: False)
        answers.append(norms(model, x, params=params))
    has_loop = name not in ("reflected", "stride")
    needs_loop = frozen != "weight" or name == "norm"
    if torch.get_num_threads() <= 2:
        assert bool(called) == (has_numba() and has_loop and needs_loop)
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=1e-11, atol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_positions_below_a_mean_take_one_product(monkeypatch, bias):
    model = nn.Linear(5, 4, bias=bias).double()
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    last = torch.ones(3, 6, 1, dtype=torch.float64)
    last[1, 3] = 2  # one gradient that differs, neither the first nor the last

    def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(model(x).mean(1)).sum(1)

    def almost(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((model(x) * last).mean(1)).sum(1)

    products, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a: products.append(1) or bmm(*a))
    monkeypatch.setattr(loops, "has_numba", lambda: False)
    for losses_of in (mean, almost):
        expected = psg.per_sample_factors(model, losses_of, (x,)).norms()
        products.clear()
        for _ in range(2):
            found = psg.per_sample_grad_norms(model, losses_of, (x,))
        torch.testing.assert_close(found, expected)
        assert bool(products) == (losses_of is almost)


def test_a_parameter_of_several_calls_has_their_cross_terms():
    model = Apply(lambda m, x: m.a(torch.tanh(m.a(x))), a=nn.Linear(4, 4)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    expected = psg.per_sample_factors(model, fold, (x,)).norms()
    for _ in range(2):
        torch.testing.assert_close(norms(model, x), expected)


def test_no_samples_have_no_norms():
    model = nn.Linear(3, 2)
    for _ in range(2):
        assert norms(model, torch.zeros(0, 3)).shape == (0,)
