"""Every kind of layer agrees with a float64 loop over samples; a case is one row."""

from __future__ import annotations

import pytest
import torch
from support.per_sample_grad.agreement import METHODS, TOLERANCES, agree
from support.per_sample_grad.gradient_oracle import error, oracle
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
        agree(
            psg.per_sample_factors(model, case.loss, inputs, **options),
            truth,
            TOLERANCES[dtype],
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_parameter_may_be_the_only_one(case):
    model, inputs = case.make(torch.float64)
    for name, truth in oracle(case, model, inputs).items():
        found = psg.per_sample_factors(
            model, case.loss, inputs, params=[name], **case.options
        )
        assert error(found.materialize()[name], truth) <= 1e-10, name
