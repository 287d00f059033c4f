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


@pytest.mark.parametrize(
    ("dtype", "budget"), [(torch.float64, 1), (torch.float32, None)], ids=str
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_answer_equals_the_loop(case, dtype, budget):
    """Also in chunks of one sample, as a budget of one byte asks for."""
    model, inputs = case.make(dtype)
    truth = oracle(case, model, inputs)
    for method in METHODS:
        options = {"method": method, "budget": budget, **case.options}
        with psg.capture(model, **options) as recorded:
            losses = case.loss(model, *inputs)
        agree(recorded.backward(losses), truth, TOLERANCES[dtype])
