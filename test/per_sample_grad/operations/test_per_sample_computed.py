"""Weights that are computed from parameters: masked, bounded, normalised ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.agreement import agree
from support.per_sample_grad.gradient_oracle import Case, fold, oracle
from torch import nn
from torch.nn.utils import parametrizations

import per_sample_grad as psg

# From a module with masks, and its parameter.
Computing = Callable[[Any, torch.Tensor], torch.Tensor]


class Computed(nn.Module):
    """A layer whose weight is computed from the parameter ``p``, after a Linear."""

    def __init__(self, computing: Computing, shape: tuple[int, ...], apply) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.p = nn.Parameter(torch.randn(shape))
        self.computing, self.apply_weight = computing, apply
        # Masks are the model's own, or they might be samples.
        self.register_buffer("mask", MASK)
        self.register_buffer("channels", CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_weight(self.first(x).tanh(), self.computing(self, self.p))


def linear(computing: Computing, *shape: int) -> Callable[[], nn.Module]:
    return lambda: Computed(computing, shape or (5, 4), F.linear)


def convolution(computing: Computing, groups: int = 1) -> Callable[[], nn.Module]:
    def apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x.transpose(1, 2), weight, groups=groups)

    return lambda: Computed(computing, (6, 4 // groups, 2), apply)


def parametrized(
    parametrize: Callable[..., nn.Module], layer: Callable[[], nn.Module]
) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, 4), parametrize(layer()))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(4, 3))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, torch.sigmoid(self.p))


def by_columns(m: Any, p: torch.Tensor) -> torch.Tensor:
    return p / p.square().sum(0).sqrt() + p.logsumexp(0, keepdim=True)


def indices(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(4, (batch, 5), generator=torch.Generator().manual_seed(0)),)


MASK = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0],
                     [1, 0, 0, 0]], dtype=torch.float64)  # fmt: skip
CHANNELS = torch.linspace(0, 2, 48, dtype=torch.float64).view(6, 4, 2)
WEIGHTS: dict[str, Computing] = {
    "masked": lambda m, p: p * m.mask,
    "masked-by-bool": lambda m, p: p.masked_fill(m.mask == 0, 0),
    "masked-product": lambda m, p: (p * 3).exp() * m.mask,
    "bounded": lambda m, p: p.tanh(),
    "again": lambda m, p: torch.sigmoid(p * m.mask).clamp(0.2, 0.8),
    "over-shared": lambda m, p: m.mask / (2 + p.square()),
    "unit-rows": lambda m, p: F.normalize(p, dim=1),
    "unit-rows-of-zeros": lambda m, p: F.normalize(p * m.mask[:, :1], dim=1),
    "unit-columns": lambda m, p: F.normalize(p, dim=0),
    "unit-matrix": lambda m, p: p / p.norm(),
    "centred": lambda m, p: p - p.mean(1, keepdim=True),
    "sums": lambda m, p: p * p.sum(1, keepdim=True) + p.sum(),
    "standardised": lambda m, p: (
        (p - p.mean(1, True)) / (p.var(1, keepdim=True) + 0.1).sqrt()
    ),
    "columns": by_columns,
    "spectral": lambda m, p: p / torch.dot(m.mask[:, 2], p @ m.mask[2]),
    "spectral-turned": lambda m, p: p * torch.dot(p @ m.mask[2], m.mask[:, 2]),
    "spectral-conjugate": lambda m, p: p * torch.vdot(p @ m.mask[2], m.mask[:, 2]),
    "largest": lambda m, p: p / p.abs().amax(1, keepdim=True),
}
WEIGHT = parametrizations.weight_norm


def without(name: str) -> Callable[[nn.Module], nn.Module]:
    """Returns weight norm of which one parameter is not trained."""

    def normalised(layer: nn.Module) -> nn.Module:
        own = WEIGHT(layer).parametrizations.weight
        frozen = {"gain": own.original0, "direction": own.original1}[name]
        frozen.requires_grad_(False)
        return layer

    return normalised


CASES = [
    *(Case(f"{name}-{dims}", linear(computing), shape)
      for name, computing in WEIGHTS.items()
      for dims, shape in (("one-position", (3,)), ("positions", (7, 3)))),
    Case("weight-norm", parametrized(WEIGHT, lambda: nn.Linear(4, 5)), (3,)),
    *(Case(f"weight-norm-without-{name}", parametrized(
        without(name), lambda: nn.Linear(4, 5)), (3,))
      for name in ("gain", "direction")),
    Case("weight-norm-positions", parametrized(
        WEIGHT, lambda: nn.Linear(4, 5)), (6, 3)),
    Case("weight-norm-of-columns", parametrized(
        lambda layer: WEIGHT(layer, dim=1), lambda: nn.Linear(4, 5)), (3,)),
    Case("weight-norm-of-all", parametrized(
        lambda layer: WEIGHT(layer, dim=None), lambda: nn.Linear(4, 5)), (3,)),
    Case("weight-norm-convolution", parametrized(
        WEIGHT, lambda: nn.Conv1d(5, 4, 3, groups=1)), (5, 3)),
    Case("spectral-norm", parametrized(
        lambda layer: parametrizations.spectral_norm(layer).eval(),
        lambda: nn.Linear(4, 5)), (3,)),
    Case("masked-convolution", convolution(lambda m, p: p * m.channels), (5, 3)),
    Case("masked-groups", convolution(
        lambda m, p: p * m.channels[:, :2], groups=2), (5, 3)),
    Case("unit-filters", convolution(
        lambda m, p: p / p.norm(dim=(1, 2), keepdim=True)), (5, 3)),
    Case("of-one-vector", linear(lambda m, p: torch.outer(p, p)[:, :4] * 2, 5), (3,)),
    Case("table", Table, indices),
]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_that_are_computed(case, batch):
    model, inputs = case.make(torch.float64, batch)
    truth = oracle(case, model, inputs)
    for _ in range(2):  # compared, and proven
        agree(psg.per_sample_factors(model, fold, inputs), truth, 1e-10)


def test_a_vector_of_other_values_than_a_buffer_may_be_samples():
    model = Computed(lambda m, p: p / (p @ m.copy).sum(), (5, 4), F.linear)
    model.register_buffer("vector", torch.ones(4))
    model.copy, x = model.vector.clone(), torch.randn(3, 3)
    psg.per_sample_factors(model, fold, (x,))
    model.copy = 2 * model.vector
    with pytest.raises(psg.CoverageError, match="may be samples"):
        psg.per_sample_factors(model, fold, (x,))
