"""Layers agree with a float64 loop over samples: every case, and drawn ones."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.per_sample_grad.agreement import METHODS, TOLERANCES, agree
from support.per_sample_grad.drawn_layers import KINDS, convolutions
from support.per_sample_grad.gradient_oracle import (
    Case,
    Gradients,
    captured,
    error,
    flat,
    oracle,
)
from support.per_sample_grad.layer_cases import CASES
from torch import nn

import per_sample_grad as psg
from per_sample_grad.factors import algebra, plan
from per_sample_grad.layers import registry
from per_sample_grad.layers.convolution import padding_widths
from per_sample_grad.layers.patches import Unfolding, padded

# torch warns about even kernels
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even")


Inputs = tuple[torch.Tensor, ...]


def examples(number: int) -> hypothesis.settings:
    checks = list(HealthCheck)
    return hypothesis.settings(max_examples=number, suppress_health_check=checks)


def reversed_order(x: torch.Tensor) -> torch.Tensor:
    return x.permute(*range(x.dim())[::-1])


LAYOUTS = {  # from a tensor to the same values
    "contiguous": lambda x: x,
    "last varies slowest": lambda x: reversed_order(reversed_order(x).contiguous()),
    "every other": lambda x: torch.stack([x, torch.full_like(x, 7)], -1)[..., 0],
    "shifted": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


def lost(case: Case, model: nn.Module, inputs: Inputs, truth: Gradients) -> float:
    """Returns the loop's own error in this dtype, where a parameter's terms cancel."""
    dtype = next(model.parameters()).dtype
    rows, size = oracle(case, model, inputs, dtype), flat(truth).norm()
    return max(error(rows[name], truth[name], size) for name in truth)


def lost_by_products(factors: psg.Factors, truth: Gradients) -> float:
    """Returns what answers from products may be off by, where positions cancel."""
    merged = filter(None, factors.merged.values())
    terms = [algebra.squared_norms_and_terms(u, len(factors))[1] for u in merged]
    rounding = plan.ROUNDINGS * sum(torch.finfo(t.dtype).eps * t.sum() for t in terms)
    return float(rounding / flat(truth).square().sum().clamp(min=1e-30))


def wrong_by_itself(case: Case, model: nn.Module, *layouts: Inputs) -> bool:
    """Returns whether autograd's gradient depends on the memory layout.

    That of BatchNorm in evaluation mode does, in torch 2.9 and 2.13: inputs of shape
    (1, 2, 1, 2) and strides (1, 1, 2, 2) have other weight gradients than contiguous
    ones.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    one, other = (
        torch.autograd.grad(case.loss(model, *x).sum(), params, materialize_grads=True)
        for x in layouts
    )
    # A gradient that cancels to nothing is rounding, whatever the layout.
    floor = 1e-3 * torch.stack([a.norm() for a in one]).norm()
    return any(
        not torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(max(a.norm(), floor)))
        for a, b in zip(one, other)
    )


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
        factors = psg.per_sample_factors(model, case.loss, inputs, **options)
        agree(factors, truth, TOLERANCES[dtype])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_parameter_may_be_the_only_one(case):
    model, inputs = case.make(torch.float64)
    for name, truth in oracle(case, model, inputs).items():
        options = {"params": [name], **case.options}
        found = psg.per_sample_factors(model, case.loss, inputs, **options)
        assert error(found.materialize()[name], truth) <= 1e-10, name


@pytest.mark.parametrize("number", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_layers_equal_the_loop(kind, number):
    @given(
        case=KINDS[kind], batch=st.integers(1, 4), seed=st.integers(0, 3),
        dtype=st.sampled_from([*TOLERANCES]), method=st.sampled_from(METHODS),
        budget=st.sampled_from([1, 1000, 2**28]), layout=st.sampled_from([*LAYOUTS]),
    )  # fmt: skip
    @examples(number)
    def check(case, batch, dtype, method, budget, layout, seed):
        model, inputs = case.make(dtype, batch, seed)
        truth = oracle(case, model, inputs)
        tolerance = max(TOLERANCES[dtype], 2 * lost(case, model, inputs, truth))
        laid_out = tuple(LAYOUTS[layout](x) for x in inputs)
        options = {"method": method, "budget": budget, **case.options}
        recorded, losses = captured(model, case.loss, *laid_out, **options)
        if wrong_by_itself(case, model, inputs, laid_out):
            with pytest.raises(psg.CouplingError):
                recorded.backward(losses)
            return
        factors = recorded.backward(losses)
        if method == "factored":  # "auto" and "materialized" lose nothing
            tolerance = max(tolerance, lost_by_products(factors, truth))
        agree(factors, truth, tolerance)

    check()


def test_every_rule_is_drawn():
    drawn = {kind for kind in registry.RULES if kind.__module__.startswith("torch.nn")}
    names = {
        "Linear", "Bilinear", "Embedding", "LayerNorm", "RMSNorm", "GroupNorm", "PReLU",
        "MultiheadAttention", "SyncBatchNorm",
    }  # fmt: skip
    drawn.remove(nn.EmbeddingBag)  # XLA computes it on the host
    for family in ("Conv", "ConvTranspose", "InstanceNorm", "BatchNorm"):
        names |= {f"{family}{rank}d" for rank in (1, 2, 3)}
    assert {kind.__name__ for kind in drawn} == names


@given(case=convolutions(), batch=st.integers(1, 3))
@examples(25)
def test_slices_see_what_views_see(case, batch):
    """Slices are what XLA runs; they are compared here."""
    model, (x,) = case.make(torch.float32, batch)
    with torch.no_grad():
        positions = model(x).shape[2:]
    unfolding = Unfolding(
        padding_widths(model), model.padding_mode, model.kernel_size, model.stride,
        model.dilation, positions, model.groups,
    )  # fmt: skip
    around = padded(x, unfolding.widths, unfolding.mode)
    views, slices = unfolding.by_views(around), unfolding.by_slices(around)
    torch.testing.assert_close(views, slices, rtol=0, atol=0)
