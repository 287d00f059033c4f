"""All answers about per-sample gradients, compared with a loop and with one another."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import per_sample_grad as psg
from support.per_sample_grad import Case, Gradients, error, flat

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
METHODS = ["auto", "factored", "materialized"]


def answers(
    factors: psg.Factors, weights: torch.Tensor, vectors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Returns every answer, by name; ``weights`` are ``(2, B)``."""
    sums = factors.weighted_sum(weights)
    # Views of more, as the state of an optimizer may have.
    pairs = {name: torch.stack([each, each], 1) for name, each in sums.items()}
    totals = {name: torch.ones_like(pair)[:, 0] for name, pair in pairs.items()}
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
        "dot": factors.dot(vectors),
        "cross gram": factors.cross_gram(factors),
    }


def agree(
    factors: psg.Factors,
    truth: dict,
    tolerance: float,
    fetch: Callable[[Any], Any] = lambda found: found,
) -> None:
    """Checks all answers, fetched at once, against the oracle and one another."""
    grads = flat(truth)
    size = grads.norm()
    gram = grads @ grads.T
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    weights = draw(2, len(grads))
    vectors = {name: draw(values.shape[1:]) for name, values in truth.items()}
    device = factors.losses.device
    there = {name: vector.to(device) for name, vector in vectors.items()}
    found = fetch(answers(factors, weights.to(device), there))
    assert found["gradients"].keys() == truth.keys()
    for name, values in found["gradients"].items():
        assert error(values, truth[name], size) <= tolerance, name
    norms = found["norms"]
    assert torch.isfinite(norms).all()
    assert (norms >= 0).all()
    assert error(norms, grads.norm(dim=1)) <= tolerance
    assert error(found["squared norms"], grads.norm(dim=1) ** 2) <= tolerance
    for name, values in found["norms by parameter"].items():
        # Where positions cancel, the square root enlarges rounding errors of squares.
        expected = flat([truth[name]]).norm(dim=1)
        most = min(tolerance * (size / max(expected.norm(), 1e-300)) ** 2, 1.0)
        found_error = error(values, expected, 1e6 * tolerance * size)
        assert found_error <= max(most, tolerance), name
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
    direction = flat({name: vector[None] for name, vector in vectors.items()})[0]
    # Drawn, so that products may cancel: relative to their bound.
    bound = grads.norm(dim=1) * direction.norm()
    assert error(found["dot"], grads @ direction, 1e6 * bound.norm()) <= tolerance
    assert error(found["cross gram"], gram) <= tolerance
    lowest = torch.linalg.eigvalsh(K.cpu().double())[:1]  # none of no samples
    assert (lowest >= -10 * tolerance * float(gram.norm())).all()


def agree_with_loop(case: Case, model: nn.Module, inputs: Any, **options: Any) -> None:
    """Checks all answers in float64, found with these options beside the case's."""
    factors = case.factors(model, inputs, **options)
    agree(factors, case.oracle(model, inputs), 1e-10)


def assert_same_grads(one: nn.Module, other: nn.Module) -> None:
    """Asserts that the parameters of two models have the same ``.grad``, or none."""
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


def projected(gradients: Gradients, projection: psg.Projection) -> Gradients:
    """Returns gradients times the map's matrix, which is made of where impulses go."""
    found = {}
    for name, values in gradients.items():
        impulses = torch.eye(values[0].numel(), dtype=torch.float64)
        shape = (1, 1) if values.dim() == 1 else (-1, *values.shape[1:])
        places = projection.of(name, [psg.Dense(impulses.reshape(shape))], 2**30)
        found[name] = values.flatten(1) @ places
    return found
