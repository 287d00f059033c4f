"""Models that no rule, or a wrong rule, accounts for: one row each."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from support.per_sample_grad.gradient_oracle import Case
from support.per_sample_grad.layer_cases import CASES, Apply, WithParameter


def with_parameter(
    function: Callable[..., torch.Tensor], *shape: int
) -> Callable[[], nn.Module]:
    """A module applies a function to what is between 0 and 1, and to a parameter."""
    return lambda: WithParameter(
        lambda m, x: function(torch.sigmoid(m.inner(x)), m.p), *(shape or (4,)),
        inner=nn.Linear(3, 4),
    )  # fmt: skip


def positions(deep: nn.Module | None = None) -> nn.Module:
    """Returns a model with position ids that have no batch dimension."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        places = m.deep(m.embed(torch.arange(x.shape[1], device=x.device)))
        return m.inner(torch.tanh(x + places))

    parts = {"embed": nn.Embedding(5, 3), "inner": nn.Linear(3, 2)}
    return Apply(forward, **parts, deep=deep or nn.Identity())


def masked(m: WithParameter, x: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(12, device=x.device).view(4, 3) % 3 > 0
    return nn.functional.linear(x, m.p * mask)


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


powered = with_parameter(lambda x, p: x ** (3 * p.abs()))
of_angle = with_parameter(turned)

# What rules of operations account for, and no module's rule.
BY_OPERATIONS = [
    Case("power", powered, (3,)),
    Case("raw-parameter", with_parameter(torch.mul), (3,)),
    Case("functional-use", lambda: Apply(
        lambda m, x: nn.functional.linear(torch.tanh(m.inner(x)), m.inner.weight),
        inner=nn.Linear(3, 3)), (3,)),
    Case("positions", positions, (5, 3)),
    Case("weight-norm", lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 2))), (3,)),
    Case("pruned", pruned, (3,)),
    Case("masked", lambda: nn.Sequential(
        WithParameter(masked, 4, 3), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    Case("weight-as-input", lambda: Apply(
        lambda m, x: m.inner(x) @ m.inner(m.outer.weight).T,
        inner=nn.Linear(3, 4), outer=nn.Linear(3, 2, bias=False)), (3,)),
    Case("patched-forward", patched, (3,)),
]  # fmt: skip

UNSEEN = [
    Case("turned", of_angle, (3,)),
    Case("turned-on-positions", of_angle, (5, 3)),
    Case("deep-positions-square", lambda: positions(nn.Linear(3, 3)), (3, 3)),
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
