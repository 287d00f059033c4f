"""Norms straight from a backward pass are those of factors."""

from __future__ import annotations

import pytest
import torch
from support.per_sample_grad.gradient_oracle import fold
from torch import nn

import per_sample_grad as psg


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


def test_neither_chunks_nor_forms_change_the_numbers():
    model, x = several_layers(), torch.randn(5, 3, 16, 16)
    answers = [norms(model, x, method="materialized") for _ in range(2)]
    answers += [norms(model, x, budget=budget) for budget in (None, 1, 2**16, 2**30)]
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=1e-5, atol=0)


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


LAYERS = {
    "image": (nn.Conv2d(3, 5, 3, padding=1), (3, 22, 25)),
    "no padding": (nn.Conv2d(4, 8, 3), (4, 25, 25)),
    "much padding": (nn.Conv2d(1, 6, 3, padding=(0, 4), bias=False), (1, 35, 11)),
    "reflected": (
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        (2, 23, 23),
    ),
    "stride": (nn.Conv2d(2, 3, 3, stride=2), (2, 47, 47)),
    "tokens": (nn.Linear(11, 13), (6, 11)),
    "wide tokens": (nn.Linear(1030, 30, bias=False), (5, 1030)),
    "norm": (nn.LayerNorm(7), (5, 7)),
    "table": (nn.Embedding(6, 3, padding_idx=2), (9,)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_sizes_that_are_computed_in_other_ways(name, frozen):
    layer, shape = LAYERS[name]
    layer = layer.double().requires_grad_()
    params = [f"0.{n}" for n, _ in layer.named_parameters() if n != frozen]
    if not params:
        return
    x = torch.randn(3, *shape, dtype=torch.float64)
    if name == "table":
        x = torch.randint(0, 6, (3, *shape))
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten())
    own = [p for n, p in model.named_parameters() if n in params]
    rows = [
        torch.autograd.grad(loss, own, retain_graph=True) for loss in fold(model, x)
    ]
    expected = torch.stack([torch.cat([g.flatten() for g in r]).norm() for r in rows])
    for _ in range(2):
        torch.testing.assert_close(norms(model, x, params=params), expected)
