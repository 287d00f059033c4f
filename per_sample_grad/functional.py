"""One call from model and batch to answer; and a drop-in for the functional style."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from per_sample_grad.capture import capture
from per_sample_grad.errors import PerSampleError
from per_sample_grad.factors import Factors

LossFunction = Callable[..., torch.Tensor]


def per_sample_factors(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> Factors:
    """Forward and backward pass in one call; all the answers are methods of the result.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` gives the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        **options: Those of `capture`.

    Raises:
        PerSampleError: The answer would be wrong; see `capture`.
    """
    with capture(model, **options) as recorded:
        losses = loss_fn(model, *batch)
    return recorded.backward(losses)


def per_sample_grads(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> dict[str, torch.Tensor]:
    """Every gradient, ``(B, *shape)`` by name; arguments of `per_sample_factors`."""
    return per_sample_factors(model, loss_fn, batch, **options).materialize()


def per_sample_grad_norms(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> torch.Tensor:
    """``‖g_i‖``, ``(B,)``; arguments of `per_sample_factors`."""
    return per_sample_factors(model, loss_fn, batch, **options).norms()


def per_sample_gram(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> torch.Tensor:
    """``⟨g_i, g_j⟩``, ``(B, B)``; arguments of `per_sample_factors`."""
    return per_sample_factors(model, loss_fn, batch, **options).gram()


def per_sample_grad_dot(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    vectors: Mapping[str, torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    """``⟨v, g_i⟩``, ``(B,)`` or ``(B, K)``; see `Factors.dot`."""
    return per_sample_factors(model, loss_fn, batch, **options).dot(vectors)


def weighted_grad(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    weights: torch.Tensor,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """``Σ_i w_i g_i`` by name; see `Factors.weighted_sum`."""
    return per_sample_factors(model, loss_fn, batch, **options).weighted_sum(weights)


def vectorized_grads(
    loss_fn: Callable[..., torch.Tensor],
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    *batch: torch.Tensor,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gradients and losses in the functional style: ``vmap(grad_and_value(loss_fn))``.

    A drop-in for samplers written for `torch.func`, where that is safe: it forms all
    gradients, and it is refused on XLA. `per_sample_grads` needs neither.

    Args:
        loss_fn: ``loss_fn(params, buffers, *sample)`` gives one number; a sample has
            no batch dimension.
        params: By name.
        buffers: By name; not changed.
        *batch: Tensors ``(B, ...)``.
        randomness: Of random operations such as dropout: ``"error"``,
            ``"different"`` for each sample, or ``"same"``.
        chunk_size: Samples at a time; None: all.

    Returns:
        Gradients ``(B, *shape)`` by name, and losses ``(B,)``.

    Raises:
        PerSampleError: Tensors are on XLA, where functional transforms of some
            operations silently return zeros.
    """
    for name, tensor in (*params.items(), *enumerate(batch)):
        if tensor.device.type == "xla":
            raise PerSampleError(
                f"vectorized_grads: {name} is on {tensor.device}, where functional "
                "transforms return zeros for some operations (kl_div, std, selu, ...); "
                "use per_sample_grads, which runs there"
            )
    transformed = torch.func.vmap(
        torch.func.grad_and_value(loss_fn),
        in_dims=(None, None, *(0 for _ in batch)),
        randomness=randomness,
        chunk_size=chunk_size,
    )
    return transformed(dict(params), dict(buffers), *batch)


def cross_gram(first: Factors, second: Factors) -> torch.Tensor:
    """``⟨g_i, g'_j⟩`` between the samples of two batches of one model: ``(B, B')``."""
    return first.cross_gram(second)
