"""The estimators of gradient noise: every outcome, closed forms, and what must hold."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size import gradient_noise

F64 = torch.float64


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def statistics(variance, square, weight=1.0, dtype=F64) -> torch.Tensor:
    return torch.tensor([[variance], [square], [weight]], dtype=dtype)


def estimate_of(gradients: torch.Tensor, minibatch_size: int = 1) -> torch.Tensor:
    """Returns the estimate, ``(3, G)``, from minibatch gradients ``(G, n, d)``."""
    matrix = gradient_noise.coefficients(gradients.shape[1], minibatch_size)
    squares, of_mean = (gradients**2).sum((1, 2)), (gradients.mean(1) ** 2).sum(1)
    return gradient_noise.estimate(squares, of_mean, torch.tensor(matrix, dtype=F64))


@pytest.mark.parametrize("sizes", [(1, 3, 2), (3, 3), (1, 1, 1, 1)])
def test_the_estimators_are_unbiased(sizes):
    """Every outcome of some samples, each of gradient m + 1 or m - 1, is averaged."""
    mean, total = 0.75, vector(sum(sizes))
    matrix = gradient_noise.weighted_coefficients(vector(len(sizes)), total)
    weighted, plain = [], []
    for signs in itertools.product((-1.0, 1.0), repeat=sum(sizes)):
        samples = torch.tensor([mean + sign for sign in signs], dtype=F64).split(sizes)
        sums = vector(*(each.sum() for each in samples))
        squares = (sums**2 / vector(*sizes)).sum().reshape(1)
        square = (sums.sum() / total) ** 2
        weighted.append(gradient_noise.estimate(squares, square, matrix))
        plain.append(estimate_of(sums.reshape(1, -1, 1) / sizes[0], sizes[0]))
    for estimates in (weighted, plain) if len({*sizes}) == 1 else (weighted,):
        found = torch.stack(estimates).mean(0)[:2, 0]
        torch.testing.assert_close(found, vector(1.0, mean**2))


any_number = st.floats(-(2.0**100), 2.0**100, width=32)
positive = st.floats(1e-3, 1e3)
ratios = st.just(1.0) | st.floats(2**-12, 2**12, width=32)


@given(variance=any_number, square=any_number, ratio=ratios, ref=st.integers(1, 4096))
def test_the_gain_keeps_its_bounds(variance, square, ratio, ref):
    for dtype in (torch.float32, F64):
        estimate = statistics(variance, square, dtype=dtype)
        gain = gradient_noise.gain(estimate, torch.tensor([ratio], dtype=dtype), ref)
        assert min(1, ratio) <= gain <= max(1, ratio)


@given(variance=positive, square=positive, ratio=positive)
def test_the_gain_is_the_papers(variance, square, ratio):
    """(sigma^2 + mu^2) / (sigma^2 / S + mu^2), and (B/B0) (B0 + N) / (B + N)."""
    gain = gradient_noise.gain(statistics(variance, square), vector(ratio), 32).item()
    sigma2, scale = variance / 32, gradient_noise.noise_scale(variance, square)
    assert gain == pytest.approx((sigma2 + square) / (sigma2 / ratio + square))
    efficiency = (32 + scale) / (ratio * 32 + scale)
    assert gain == pytest.approx(ratio * efficiency)


@pytest.mark.parametrize(("variance", "square", "ratio", "gain"), [
    (1.0, 0.0, 4.0, 4.0),  # all noise: the linear rule
    (1.0, -1.0, 4.0, 4.0),
    (0.0, 1.0, 4.0, 1.0),  # no noise: a larger batch gains nothing
    (-1.0, 1.0, 4.0, 1.0),
    (0.0, 0.0, 4.0, 1.0),  # nothing known: careful
    (0.0, 0.0, 0.25, 0.25),
    (1e-30, 1e-30, 4.0, 1.6),  # small gradients are not taken for none
    (1e30, 1e30, 4.0, 1.6),
])  # fmt: skip
def test_the_edges_of_the_gain(variance, square, ratio, gain):
    estimate = statistics(variance, square, dtype=torch.float32)
    found = gradient_noise.gain(estimate, torch.tensor([ratio]), 1)
    assert found.item() == pytest.approx(gain)


def test_noise_scale():
    found = [gradient_noise.noise_scale(v, s) for v, s in ((6, 2), (-6, 2), (1, 0))]
    assert found == [3.0, 0.0, math.inf]
    assert math.isnan(gradient_noise.noise_scale(0.0, 0.0))
