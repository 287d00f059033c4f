"""Models that no rule, or a wrong rule, accounts for: one row each."""

from __future__ import annotations

import types

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from support.per_sample_grad.gradient_oracle import Case
from support.per_sample_grad.layer_cases import CASES, Apply, WithParameter


def raw() -> nn.Module:
    """Returns a module that uses a parameter directly, beside a Linear."""
    return WithParameter(
        lambda m, x: torch.tanh(m.inner(x)) * m.p, 4, inner=nn.Linear(3, 4)
    )


class Positions(nn.Module):
    """A module with position ids that have no batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(5, 3), nn.Linear(3, 2)
        self.deep = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.deep(self.embed(torch.arange(x.shape[1], device=x.device)))
        return self.inner(torch.tanh(x + places))


class DeepPositions(Positions):
    """A table of positions that goes through a layer before it meets samples."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Linear(3, 3)


class Masked(nn.Module):
    """A layer whose weight is a parameter times a buffer, as pruning leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("mask", (torch.arange(12).view(4, 3) % 3 > 0).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.mask)


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    prune.random_unstructured(model[0], "weight", 0.5)
    return model


def patched() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2))
    double = types.MethodType(lambda m, x: 2 * nn.Linear.forward(m, x), model[0])
    model[0].forward = double
    return model


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Returns ``x * cos(angle)`` by an operation that has no rule."""
    return torch.polar(x, angle).real


class Turned(nn.Module):
    """A module whose parameter meets samples in an operation that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.angle = nn.Linear(3, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return turned(torch.sigmoid(self.inner(x)), 3 * self.angle)


class Cube(Turned):
    """A module whose operation autograd itself has a formula of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.inner(x)) ** (3 * self.angle)


# What rules of operations account for, and no module's rule.
BY_OPERATIONS = [
    Case("cube", Cube, (3,)),
    Case("cube-on-positions", Cube, (5, 3)),
    Case("raw-parameter", raw, (3,)),
    Case("functional-use", lambda: Apply(
        lambda m, x: nn.functional.linear(torch.tanh(m.inner(x)), m.inner.weight),
        inner=nn.Linear(3, 3)), (3,)),
    Case("positions", Positions, (5, 3)),
    Case("weight-norm", lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 2))), (3,)),
    Case("pruned", pruned, (3,)),
    Case("masked", lambda: nn.Sequential(Masked(), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    Case("weight-as-input", lambda: Apply(
        lambda m, x: m.inner(x) @ m.inner(m.outer.weight).T,
        inner=nn.Linear(3, 4), outer=nn.Linear(3, 2, bias=False)), (3,)),
    Case("patched-forward", patched, (3,)),
]  # fmt: skip

UNSEEN = [
    Case("turned", Turned, (3,)),
    Case("turned-on-positions", Turned, (5, 3)),
    Case("deep-positions-square", DeepPositions, (3, 3)),
    Case("unbatched-conv", lambda: Apply(
        lambda m, x: torch.stack([m.inner(item) for item in x]),
        inner=nn.Conv1d(3, 3, 1)), (3, 4)),
]  # fmt: skip


class Doubling(nn.Linear):
    """A Linear that the rule of Linear is wrong for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * x)


COUPLED = [
    Case("coupled-square", lambda: Apply(
        lambda m, x: m.inner(x.transpose(0, 1)).transpose(0, 1),
        inner=nn.Linear(3, 4)), (3, 3)),
    Case("batch-mean", lambda: Apply(
        lambda m, x: m.b(m.a(x) - m.a(x).mean(0, keepdim=True)),
        a=nn.Linear(3, 4), b=nn.Linear(4, 2)), (3,)),
    Case("wrong-rule", lambda: nn.Sequential(Doubling(3, 2)), (3,)),
    Case("swapped-fold", lambda: Apply(
        lambda m, x: m.inner(x.transpose(0, 1).flatten(0, 1))
        .unflatten(0, (-1, len(x))).transpose(0, 1), inner=nn.Linear(3, 2)), (4, 3)),
]  # fmt: skip

BY_NAME = {case.name: case for case in (*CASES, *BY_OPERATIONS, *UNSEEN, *COUPLED)}
