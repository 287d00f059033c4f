"""One call from model and batch to answer; and a drop-in for the functional style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from per_sample_grad.engine.capturing import capture
from per_sample_grad.errors import PerSampleError
from per_sample_grad.factors.factors import Factors, check_vectors

LossFunction = Callable[..., torch.Tensor]
_T = TypeVar("_T")


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
    later: list[Factors] = []

    def answer(factors: Factors) -> dict[str, torch.Tensor]:
        # The last layers come first, and their gradients, the largest often, would be
        # there while the activations of all the others still are.
        if factors.smaller_than_gradients:
            later.append(factors)
            return {}
        return factors.materialize()

    found, names = _streamed(model, loss_fn, batch, options, answer)
    while later:
        found.update(later.pop().materialize())
    return {name: found[name] for name in names}


def per_sample_grad_norms(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> torch.Tensor:
    """``‖g_i‖``, ``(B,)``; arguments of `per_sample_factors`."""
    squares, _ = _streamed(
        model, loss_fn, batch, options, lambda f: f.norms(squared=True)
    )
    return squares.sqrt()


def per_sample_gram(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> torch.Tensor:
    """``⟨g_i, g_j⟩``, ``(B, B)``; arguments of `per_sample_factors`."""
    return _streamed(model, loss_fn, batch, options, lambda f: f.gram())[0]


def per_sample_grad_dot(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    vectors: Mapping[str, torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    """``⟨v, g_i⟩``, ``(B,)`` or ``(B, K)``; see `Factors.dot`."""
    with capture(model, **options) as recorded:
        losses = loss_fn(model, *batch)
    many = check_vectors(
        vectors, {name: tuple(p.shape) for name, p in recorded.params.items()}
    )
    count = len(next(iter(vectors.values()))) if many else 1

    def answer(factors: Factors) -> torch.Tensor:
        columns = [
            factors.dot(
                {n: vectors[n][k] if many else vectors[n] for n in factors.shapes}
            )
            for k in range(count)
        ]
        return torch.stack(columns, 1) if many else columns[0]

    return recorded.stream(losses, answer)


def weighted_grad(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    weights: torch.Tensor,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """``Σ_i w_i g_i`` by name; see `Factors.weighted_sum`."""
    found, names = _streamed(
        model, loss_fn, batch, options, lambda f: f.weighted_sum(weights)
    )
    return {name: found[name] for name in names}


def _streamed(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    options: dict[str, Any],
    answer: Callable[[Factors], _T],
) -> tuple[_T, Iterable[str]]:
    """One answer, in the memory of training; and the names of the parameters."""
    with capture(model, **options) as recorded:
        losses = loss_fn(model, *batch)
    return recorded.stream(losses, answer), recorded.params


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
