"""One call from a model and a batch to an answer.

The functions take what `per_sample_factors` takes, and all but `vectorized_grads`
compute the same factors. Those that give one answer compute it as the backward pass
goes, in the memory of training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import xla_replica
from per_sample_grad.engine.capturing import Capture, capture
from per_sample_grad.errors import PerSampleError
from per_sample_grad.factors.factors import Factors, check_vectors

LossFunction = Callable[..., torch.Tensor]


def per_sample_factors(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> Factors:
    """Returns the factors of every gradient, whose methods are the answers.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        **options: Options of `capture`.

    Raises:
        PerSampleError: The answer would be wrong; see `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    return recorded.backward(losses)


def per_sample_grads(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> dict[str, torch.Tensor]:
    """Returns every gradient, ``(B, *shape)`` by name; see `per_sample_factors`.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        **options: Options of `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    return recorded.materialize(losses)


def per_sample_grad_norms(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> torch.Tensor:
    """Returns ``‖g_i‖``, ``(B,)``; see `per_sample_factors`.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        **options: Options of `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    return recorded.norms(losses)


def per_sample_gram(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], **options: Any
) -> torch.Tensor:
    """Returns ``⟨g_i, g_j⟩``, ``(B, B)``; see `per_sample_factors`.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        **options: Options of `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    return recorded.stream(losses, lambda f: f.gram())


def per_sample_grad_dot(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    vectors: Mapping[str, torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    """Returns ``⟨v, g_i⟩``, ``(B,)`` or ``(B, K)``; see `Factors.dot`.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        vectors: v by parameter name, ``(*shape)`` or ``(K, *shape)``.
        **options: Options of `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    shapes = {name: tuple(param.shape) for name, param in recorded.params.items()}
    check_vectors(vectors, shapes)
    return recorded.stream(
        losses, lambda f: f.dot({name: vectors[name] for name in f.shapes})
    )


def weighted_grad(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    weights: torch.Tensor,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Returns ``Σ_i w_i g_i`` by name; see `Factors.weighted_sum`.

    Args:
        model: As for `capture`.
        loss_fn: ``loss_fn(model, *batch)`` returns the losses, ``(B,)``.
        batch: Arguments of ``loss_fn``.
        weights: w, ``(B,)``.
        **options: Options of `capture`.
    """
    recorded, losses = _recorded(model, loss_fn, batch, options)
    found = recorded.stream(losses, lambda f: f.weighted_sum(weights))
    return {name: found[name] for name in recorded.params}


def cross_gram(first: Factors, second: Factors) -> torch.Tensor:
    """Returns ``⟨g_i, g'_j⟩`` of two batches of one model: ``(B, B')``.

    Args:
        first: The factors of the rows.
        second: Those of the columns.
    """
    return first.cross_gram(second)


def _recorded(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[Capture, torch.Tensor]:
    with capture(model, **options) as recorded:
        losses = loss_fn(model, *batch)
    return recorded, losses


def vectorized_grads(
    loss_fn: LossFunction,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    *batch: torch.Tensor,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns gradients and losses of a loss in the functional style of `torch.func`.

    Use it only where the loss is a function of parameters, and not of a module that is
    called: nothing can be recorded of that. It is ``vmap(grad_and_value(loss_fn))`` and
    forms every gradient. `per_sample_grads` is for modules, also on XLA.

    Args:
        loss_fn: ``loss_fn(params, buffers, *sample)`` returns one number; a sample has
            no batch dimension.
        params: Parameters by name.
        buffers: Buffers by name; not changed.
        *batch: Tensors ``(B, ...)``.
        randomness: What random operations such as dropout do: ``"error"``,
            ``"different"`` for each sample, or ``"same"``.
        chunk_size: Samples at a time; None: all.

    Returns:
        Gradients ``(B, *shape)`` by name, and losses ``(B,)``.

    Raises:
        PerSampleError: Tensors are on XLA, where functional transforms of some
            operations silently return zeros.
    """
    for name, tensor in (*params.items(), *enumerate(batch)):
        if xla_replica.traits(tensor).is_lazy:
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
