"""Exact, expensive gradients of parameters that no layer rule accounts for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch

import xla_replica

Fallback = Literal["error", "loop", "batched"]


def loop(
    losses: torch.Tensor, params: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Runs B backward passes, one per sample: exact for whatever autograd can do."""
    rows = [
        xla_replica.grad(
            loss,
            list(params.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for loss in losses.unbind()
    ]
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows))}


def batched(
    losses: torch.Tensor, params: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Runs one backward pass that torch vectorises over the samples' gradients.

    Not every operation's backward can be vectorised; torch then raises.
    """
    grads = xla_replica.grad(
        losses,
        list(params.values()),
        torch.eye(len(losses), dtype=losses.dtype, device=losses.device),
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    return {
        name: param.new_zeros(len(losses), *param.shape) if grad is None else grad
        for (name, param), grad in zip(params.items(), grads)
    }


FALLBACKS: dict[str, Callable[..., dict[str, torch.Tensor]] | None] = {
    "error": None,
    "loop": loop,
    "batched": batched,
}
