"""Every kind of layer agrees with a float64 loop over samples; a case is one row."""

from __future__ import annotations

import pytest
import torch
from support.per_sample_grad.agreement import METHODS, TOLERANCES, agree
from support.per_sample_grad.gradient_oracle import oracle
from support.per_sample_grad.layer_cases import CASES

import per_sample_grad as psg

# torch warns about even kernels
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_answer_equals_the_loop(case, dtype):
    model, inputs = case.make(dtype)
    truth = oracle(case, model, inputs)
    for method in METHODS:
        with psg.capture(model, method=method, **case.options) as recorded:
            losses = case.loss(model, *inputs)
        agree(recorded.backward(losses), truth, TOLERANCES[dtype])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_chunks_of_any_size_give_the_same(case):
    model, inputs = case.make(torch.float64)
    truth = oracle(case, model, inputs)
    for method in ("factored", "materialized"):
        with psg.capture(model, method=method, budget=1, **case.options) as recorded:
            losses = case.loss(model, *inputs)
        agree(recorded.backward(losses), truth, 1e-10)
