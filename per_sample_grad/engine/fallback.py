"""Gradients of parameters that no layer rule accounts for: exact, and dear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch

import xla_replica
from per_sample_grad.factors.forms import Contribution, Dense, widened

Fallback = Literal["error", "loop", "batched"]


def loop(
    losses: torch.Tensor, params: Mapping[str, torch.Tensor]
) -> dict[str, Contribution]:
    """B backward passes, one per sample: exact for whatever autograd can do."""
    if not params:
        return {}
    rows = [
        xla_replica.grad(
            loss, list(params.values()), retain_graph=True, allow_unused=True
        )
        for loss in losses.unbind()
    ]
    return _stacked(params, zip(*rows), len(losses))


def batched(
    losses: torch.Tensor, params: Mapping[str, torch.Tensor]
) -> dict[str, Contribution]:
    """One backward pass that torch vectorises over the samples' gradients.

    Not every operation's backward can be vectorised; torch then raises.
    """
    rows = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
    grads = xla_replica.grad(
        losses,
        list(params.values()),
        rows,
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    dense: dict[str, Contribution] = {}
    for (name, param), grad in zip(params.items(), grads):
        if grad is None:
            grad = param.new_zeros(len(losses), *param.shape)
        dense[name] = widened(Dense(grad))
    return dense


def _stacked(
    params: Mapping[str, torch.Tensor],
    columns: zip[tuple[torch.Tensor | None, ...]],
    num_samples: int,
) -> dict[str, Contribution]:
    dense: dict[str, Contribution] = {}
    for (name, param), column in zip(params.items(), columns):
        rows = [torch.zeros_like(param) if row is None else row for row in column]
        assert len(rows) == num_samples
        dense[name] = widened(Dense(torch.stack(rows)))
    return dense


FALLBACKS: dict[str, Callable[..., dict[str, Contribution]] | None] = {
    "error": None,
    "loop": loop,
    "batched": batched,
}
