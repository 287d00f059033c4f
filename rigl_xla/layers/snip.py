"""Scores for masks from data: how much the loss depends on each connection.

SNIP (Lee et al. 2019, arXiv:1810.02340) scores a connection, before training, by the
derivative of the loss by a factor of 1 before its weight: ``|w dL/dw|``. Any
distribution goes with it; `global_distribution` is SNIP's own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import xla_replica
from rigl_xla.layers.sparse_layer import to_host
from rigl_xla.layers.weights import Selector, weights_of
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import Distribution, Shapes, num_inactive
from xla_replica import Replica
from xla_replica.backends.registry import given_or_current
from xla_replica.common.arguments import check_names, check_type


def snip_scores(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    *,
    include: Selector | Iterable[Selector] = (),
    exclude: Selector | Iterable[Selector] = (),
    replica: Replica | None = None,
) -> dict[str, torch.Tensor]:
    """Returns ``|w dL/dw|`` of every weight that can be sparse, over all batches.

    For ``initial_masks=`` of `RigLScheduler`, before it is built. Changes nothing but
    the state of random numbers, where dropout draws some. Every replica must call it
    with the same number of batches; all get the same scores.

    Args:
        model: The model on its device, in the mode in which the loss is to be computed.
        batches: One or more batches, as ``loss`` takes them.
        loss: ``loss(model, batch)`` returns a tensor of one number.
        include, exclude: As for `RigLScheduler`.
        replica: Default: the one the caller runs in.

    Returns:
        Scores by parameter name, on the CPU, of the weights' shapes and dtypes. Only
        their order means something.

    Raises:
        ValueError: No batch or no weight is given, the loss is not a single number
            that depends on the weights, or a layer has gradients that are all zero or
            not finite, so that nothing tells which of its connections matter.
        TypeError: ``model`` or ``replica`` is of another type.
    """
    replica = given_or_current(replica)
    weights = weights_of(model, include, exclude)
    parameters = [weight.parameter for weight in weights]
    if not parameters:
        raise ValueError(
            "no weight of the model can be sparse, so there is nothing to score; see "
            "weights_of, include= and exclude="
        )
    total: list[torch.Tensor] = []
    with _as_it_was(model):
        for batch in batches:
            value = loss(model, batch)
            is_tensor = isinstance(value, torch.Tensor)
            if not is_tensor or value.numel() != 1 or not value.requires_grad:
                got = f"shape {tuple(value.shape)}" if is_tensor else repr(value)
                raise ValueError(
                    "loss(model, batch) must return a tensor of one number that "
                    f"depends on the model's weights, got {got}"
                )
            gradients = xla_replica.grad(value, parameters, allow_unused=True)
            # Without a copy they may be shared by autograd, and are summed in place.
            own = [
                torch.zeros_like(p) if g is None else g.detach().clone()
                for p, g in zip(parameters, gradients)
            ]
            total = [a + b for a, b in zip(total, own)] if total else own
            replica.sync()  # one program for every batch
    if not total:
        raise ValueError("snip_scores needs at least one batch, got none")
    with torch.no_grad():
        replica.all_reduce_(total)
        scores = [(p.detach() * g).abs() for p, g in zip(parameters, total)]
    fetched = dict(zip((w.name for w in weights), to_host(scores, replica)))
    for name, score in fetched.items():
        if not bool(torch.isfinite(score).all()):
            raise ValueError(
                f"the gradient of {name!r} is not finite, so its connections cannot "
                "be scored; check the batches and the loss"
            )
        if not bool(score.any()):
            raise ValueError(
                f"the loss does not depend on {name!r} as the model is now: all its "
                "gradients, or weights, are zero. Use it in the loss, begin with other "
                "weights (a last norm of zeros hides what is before it), or put it "
                "into exclude="
            )
    return fetched


def global_distribution(scores: Mapping[str, torch.Tensor]) -> Distribution:
    """Returns a distribution that gives connections to the best scores of all layers.

    For ``sparsity_distribution=`` together with the same scores for ``initial_masks=``.
    Layers that are dense by other rules do not take part; every layer keeps at least
    one connection. Among equal scores earlier layers and lower indices win.

    Args:
        scores: By parameter name; `snip_scores`, or others that compare between layers.
    """

    def distribute(free: Shapes, sparsity: float, dense: Shapes) -> dict[str, float]:
        del dense
        check_scores(scores, free)
        sizes = [math.prod(shape) for shape in free.values()]
        flat = []
        for name in free:
            own = scores[name].detach().to("cpu", torch.float64, copy=True).flatten()
            own[own.argmax()] = math.inf  # every layer keeps its best
            flat.append(own)
        budget = sum(size - num_inactive(sparsity, size) for size in sizes)
        count = max(budget, len(sizes))
        best_N = masks.top(torch.cat(flat)[None], torch.tensor([count]))[0]
        return {
            name: 1 - int(chosen.sum()) / size
            for name, chosen, size in zip(free, best_N.split(sizes), sizes)
        }

    distribute.__name__ = "global_distribution"
    return distribute


def check_scores(
    scores: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises ValueError or TypeError unless all of ``shapes`` have finite scores."""
    check_type("scores", scores, Mapping, "a dict of tensors by parameter name")
    check_names("scores are needed for", shapes, scores, "the weights that have some")
    for name, shape in shapes.items():
        given = scores[name]
        check_type(f"the scores of {name!r}", given, torch.Tensor, "a tensor")
        if given.is_complex() or given.is_meta:
            raise TypeError(
                f"the scores of {name!r} must be real numbers with values, got "
                f"{given.dtype} on {given.device}"
            )
        if tuple(given.shape) != tuple(shape):
            raise ValueError(
                f"scores of {name!r} have shape {tuple(given.shape)}; the weight has "
                f"{tuple(shape)}"
            )
        if not bool(torch.isfinite(given).all()):
            raise ValueError(f"scores of {name!r} are not all finite")


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts back buffers, which norms change, and keeps DDP from reducing gradients."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    alone = getattr(model, "no_sync", contextlib.nullcontext)
    try:
        with alone(), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
