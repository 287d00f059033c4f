"""Answers in half precision and under autocast are as precise as the dtype allows."""

from __future__ import annotations

import copy

import pytest
import torch
from support.gradient_oracle import HALF, Case, error, flat, oracle
from support.layer_cases import CASES
from torch import nn

import per_sample_grad as psg

STACKED = Case("stacked", lambda: nn.Sequential(
    nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), (5, 6))  # fmt: skip


def test_autocast():
    case = Case(
        "autocast",
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        ),
        (6,),
    )
    model, inputs = case.make(torch.float32)
    truth = flat(oracle(case, model, inputs))
    for _ in range(2):  # first with the comparison, then without
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with psg.capture(model) as recorded:
                losses = case.loss(model, *inputs)
            factors = recorded.backward(losses)
            assert error(factors.norms(), truth.norm(dim=1)) <= 2e-2
        assert error(factors.gram(), truth @ truth.T) <= 4e-2


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
    if size < 1e-6:
        with pytest.raises(psg.PerSampleError, match=r"are lost: .*scale="):
            psg.per_sample_grad_norms(model, losses_of, (x,))
    else:
        with pytest.warns(UserWarning, match=r"digits are lost.*scale="):
            psg.per_sample_grad_norms(model, losses_of, (x,))
    for _ in range(2):
        found = psg.per_sample_grad_norms(model, losses_of, (x,), scale=2.0**20)
        assert error(found, truth) <= 5e-3
    with pytest.raises(ValueError, match=r"scale must be .* > 0, got 0\.0"):
        psg.capture(model, scale=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASES, STACKED], ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
def test_every_layer_in_half_precision(case, dtype):
    """Answers agree with the same model in float64, as far as the dtype allows."""
    model, inputs = case.make(dtype)
    truth = oracle(case, model, inputs)
    with psg.capture(model, **case.options) as recorded:
        losses = case.loss(model, *inputs)
    factors = recorded.backward(losses)
    grads, tolerance = flat(truth), HALF[dtype]
    assert error(flat(factors.materialize()), grads) <= tolerance
    assert error(factors.norms(), grads.norm(dim=1)) <= tolerance
    assert error(factors.gram(), grads @ grads.T) <= 2 * tolerance
    assert factors.norms().dtype == torch.float32
