"""Every kind of layer agrees with a float64 loop over samples; a case is one row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gradient_oracle import error, flat, oracle
from support.layer_cases import CASES

import per_sample_grad as psg

# torch warns about even kernels
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even")

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
METHODS = ["auto", "factored", "materialized"]


def answers(factors: psg.Factors, weights: torch.Tensor) -> dict[str, Any]:
    """Returns every answer, by name; ``weights`` are ``(2, B)``."""
    sums = factors.weighted_sum(weights)
    # Views of one matrix, as the state of an optimizer may have.
    sizes = [math.prod(shape) for shape in factors.shapes.values()]
    matrix = weights.new_ones(2, sum(sizes), dtype=next(iter(sums.values())).dtype)
    totals = {
        name: part.view(2, *factors.shapes[name])
        for name, part in zip(factors.shapes, matrix.split(sizes, 1))
    }
    factors.add_weighted_sum_(totals, weights)
    return {
        "gradients": factors.materialize(),
        "norms": factors.norms(),
        "squared norms": factors.norms(squared=True),
        "norms by parameter": factors.norms_by_parameter(),
        "gram": factors.gram(),
        "sums": sums,
        "totals": totals,
        "dots": factors.dot(sums),
        "dot": factors.dot({name: values[0] for name, values in sums.items()}),
        "cross gram": factors.cross_gram(factors),
    }


def agree(
    factors: psg.Factors,
    truth: dict,
    tolerance: float,
    fetch: Callable[[Any], Any] = lambda found: found,
) -> None:
    """Checks all answers against the oracle, and the identities between them.

    ``fetch`` brings them to the host, all at once.
    """
    grads = flat(truth)
    size = grads.norm()
    gram = grads @ grads.T
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, len(grads), generator=generator, dtype=torch.float64)
    found = fetch(answers(factors, weights.to(factors.losses.device)))
    assert found["gradients"].keys() == truth.keys()
    for name, values in found["gradients"].items():
        assert error(values, truth[name], size) <= tolerance, name
    norms = found["norms"]
    assert torch.isfinite(norms).all()
    assert (norms >= 0).all()
    assert error(norms, grads.norm(dim=1)) <= tolerance
    assert error(found["squared norms"], grads.norm(dim=1) ** 2) <= tolerance
    for name, values in found["norms by parameter"].items():
        # Where positions cancel, the square root enlarges rounding errors.
        expected = truth[name].reshape(len(grads), -1).norm(dim=1)
        assert error(values, expected, 1e6 * tolerance * size) <= max(
            1.0 if expected.norm() <= tolerance**0.5 * size else tolerance, tolerance
        ), name
    K = found["gram"]
    assert error(K, gram) <= tolerance
    assert error(K.diagonal(), norms.cpu().double() ** 2) <= 4 * tolerance
    for name, values in found["sums"].items():
        expected = torch.einsum("kb,b...->k...", weights, truth[name])
        assert error(values, expected, size) <= tolerance, name
        scale = max(size, expected.numel() ** 0.5)
        assert error(found["totals"][name], expected + 1, scale) <= tolerance, name
    # The Gram matrix times the weights equals the dot with the weighted sum.
    assert error(found["dots"], (weights @ gram).T) <= 4 * tolerance
    assert error(found["dot"], gram @ weights[0]) <= 4 * tolerance
    assert error(found["cross gram"], gram) <= tolerance
    lowest = torch.linalg.eigvalsh(K.cpu().double())[0]
    assert lowest >= -10 * tolerance * float(gram.norm())


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
