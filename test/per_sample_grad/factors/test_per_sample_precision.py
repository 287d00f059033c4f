"""Answers in half precision and under autocast are as precise as the dtype allows."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.agreement import assert_same_grads
from support.per_sample_grad.gradient_oracle import (
    HALF,
    Case,
    captured,
    error,
    flat,
    loop,
    oracle,
)
from support.per_sample_grad.layer_cases import CASES
from support.per_sample_grad.refused_models import BY_NAME
from support.xla_replica.replicas import on_gpu
from torch import nn

import per_sample_grad as psg
from per_sample_grad.factors import forms

STACKED = Case("stacked", lambda: nn.Sequential(
    nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), (5, 6))  # fmt: skip


@pytest.mark.parametrize("case", [STACKED, BY_NAME["functional-use"]], ids=str)
def test_autocast(case):
    model, inputs = case.make(torch.float32)
    norms = flat(oracle(case, model, inputs)).norm(dim=1)
    for _ in range(2):  # first with the comparison, then without
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = psg.per_sample_grad_norms(model, case.loss, inputs)
        assert error(found, norms) <= 2e-2


@pytest.mark.parametrize("accumulate", ["mean", "sum"])
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_a_pass_that_accumulates_under_autocast(name, accumulate):
    """The forward pass is in bfloat16, the losses and everything after in float32.

    Every sample's own backward pass through the same graph has the same gradients of
    activations to the bit, since 1 / 4 scales without rounding. It rounds gradients of
    weights to bfloat16, by at most 2**-8 of every number; the factors' are not rounded.
    """
    model, (x,) = BY_NAME[name].make(torch.float32, 4)
    plain = copy.deepcopy(model)

    def losses_of(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x).float().flatten(1)
        return F.cross_entropy(logits, torch.tensor([0, 2, 1, 1]), reduction="none")

    for _ in range(2):  # first with the comparison, then without
        plain.zero_grad()
        getattr(losses_of(plain), accumulate)().backward()
        model.zero_grad()
        recorded, losses = captured(model, losses_of)
        wide = flat(loop(losses, recorded.params.values())).double()
        factors = recorded.backward(losses, accumulate=accumulate)
        assert_same_grads(model, plain)
        assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
        assert error(flat(factors.materialize()), wide) <= 2**-8
        assert error(factors.gram(), wide @ wide.T) <= 2**-7


@pytest.mark.parametrize("size", [1e-7, 1e-5])
def test_float16_that_underflows_is_told_and_can_be_scaled(size):
    """Losses are in float32, activations in float16, whose least number is 6e-8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).half()
    x = torch.randn(4, 16).half()

    def losses_of(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return size * m(x).float().square().sum(1)

    wide = copy.deepcopy(model).float()
    truth = psg.per_sample_grad_norms(wide, losses_of, (x.float(),)).double()
    told = pytest.raises(psg.PerSampleError, match=r"are lost: .*scale=")
    if size > 1e-6:
        told = pytest.warns(UserWarning, match=r"digits are lost.*scale=")
    with told:
        psg.per_sample_grad_norms(model, losses_of, (x,))
    for _ in range(2):
        found = psg.per_sample_grad_norms(model, losses_of, (x,), scale=2.0**20)
        assert error(found, truth) <= 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASES, STACKED], ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
def test_every_layer_in_half_precision(case, dtype):
    model, inputs = case.make(dtype)
    truth = oracle(case, model, inputs)
    factors = psg.per_sample_factors(model, case.loss, inputs, **case.options)
    grads, tolerance = flat(truth), HALF[dtype]
    assert error(flat(factors.materialize()), grads) <= tolerance
    assert error(factors.norms(), grads.norm(dim=1)) <= tolerance
    assert error(factors.gram(), grads @ grads.T) <= 2 * tolerance
    assert factors.norms().dtype == torch.float32


def test_only_where_all_gradients_of_outputs_are_in_bfloat16_fewer_bits_do(monkeypatch):
    """Autocast of a CPU has LayerNorm's outputs in bfloat16, like those of others."""
    asked = []

    def noted(device: torch.device, *, of_bfloat16: bool):
        return contextlib.nullcontext(asked.append(of_bfloat16))

    monkeypatch.setattr(forms, "full_matmul_precision", noted)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))

    def losses_of(model: nn.Module, enabled: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            hidden = model[0](torch.randn(2, 4))
        with torch.autocast("cpu", torch.bfloat16):
            return model[1](hidden).sum(1)

    def factors(enabled: bool, *numbers: int) -> psg.Factors:
        options = {"params": [f"{n}.weight" for n in numbers], "check": "never"}
        return psg.per_sample_factors(model, losses_of, (enabled,), **options)

    narrow, mixed = factors(True, 0, 1), factors(False, 0, 1)
    for found in (narrow, mixed, factors(False, 1), factors(False, 0)):
        found.norms()
    narrow.cross_gram(mixed)
    mixed.cross_gram(narrow)
    assert asked == [True, False, True, False, False, False]


@on_gpu
@pytest.mark.parametrize(
    ("build", "size"),
    [
        (BY_NAME["cnn"].build, (8, 2, 8, 8)),
        (lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 48)), (8, 5, 64)),
    ],
)
def test_on_a_gpu_products_of_factors_in_bfloat16_lose_nothing(build, size):
    """The oracle multiplies the same factors in float64."""
    torch.manual_seed(0)
    model, x = build().cuda(), torch.randn(size, device="cuda")
    recorded = psg.capture(model, lambda name, param: param.dim() > 1)
    with recorded, torch.autocast("cuda", torch.bfloat16):
        losses = model(x).float().square().flatten(1).sum(1)
    factors = recorded.backward(losses)
    norms = factors.norms_by_parameter()
    for name, formed in factors.materialize().items():
        (use,) = factors.contributions(name)
        part = forms.part(use, 0, len(x))
        left, right = part.left.double().cpu(), part.right.double().cpu()
        truth = (left.transpose(2, 3) @ right).flatten(1)
        assert error(norms[name], truth.norm(dim=1)) <= 1e-6
        assert error(formed.flatten(1), truth) <= 1e-6
