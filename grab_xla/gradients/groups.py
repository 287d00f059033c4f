"""The gradient of a fixed group of samples, out of any model's backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import xla_replica
from xla_replica import traits


def parameters_of(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, nn.Parameter]:
    """Returns the model's parameters of these names and shapes.

    Raises:
        ValueError: The model has no such parameter, or it is frozen.
    """
    given = model.named_parameters(remove_duplicate=False)
    found = {name: parameter for name, parameter in given if parameter.requires_grad}
    kinds = {name: parameter.shape for name, parameter in found.items()}
    wrong = [name for name, shape in shapes.items() if kinds.get(name) != shape]
    if wrong:
        raise ValueError(
            f"record: {', '.join(wrong[:5])} of GraBSampler's trainable_params are not "
            "trainable parameters of the model, of the same shapes; build the sampler "
            "with {n: p for n, p in model.named_parameters() if p.requires_grad}. Of a "
            "wrapper, such as DDP, and of the model in it, take the names and the "
            "model from one of the two"
        )
    return {name: found[name] for name in shapes}


def group_gradients(
    parameters: Mapping[str, nn.Parameter],
    dtype: torch.dtype,
    losses: Tensor,
    reduction: str,
    from_samples: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Returns what the backward pass of a group adds to ``.grad``: ``(1, columns)``.

    Or by name, ``(1, *shape)``, on a lazy device, where parts of a row are copies.
    Gradients are taken from hooks, before they are added. So what other groups have
    left in ``.grad``, and sums over replicas in the same backward pass, do not matter.
    The hooks are there during the pass alone. ``from_samples`` changes nothing.

    Raises:
        RuntimeError: The losses do not depend on the parameters.
    """
    del from_samples
    sizes, is_lazy = [p.numel() for p in parameters.values()], traits(losses).is_lazy
    row = torch.zeros(1, sum(sizes), dtype=dtype, device=losses.device)
    parts = zip(row.split(sizes, dim=1), parameters.values())
    totals = [part.view(1, *parameter.shape) for part, parameter in parts]
    if is_lazy:
        totals = [*map(torch.zeros_like, totals)]
    reached = set()

    def keep(total: Tensor, gradient: Tensor) -> None:
        # Autograd would copy a gradient that somebody keeps.
        reached.add(total)
        total[0].add_(gradient.detach().to(total.device))

    with contextlib.ExitStack() as placed:
        for parameter, total in zip(parameters.values(), totals):
            handle = parameter.register_hook(functools.partial(keep, total))
            placed.callback(handle.remove)
        add_gradient(losses, reduction)
    if not reached:
        raise of_another_model()
    return dict(zip(parameters, totals)) if is_lazy else row


def add_gradient(losses: Tensor, reduction: str) -> None:
    """Adds the gradient of the mean loss, or of the sum, to ``.grad``."""
    xla_replica.backward(losses.mean() if reduction == "mean" else losses.sum())


def of_another_model() -> RuntimeError:
    """Returns the error for losses that do not depend on a balanced parameter."""
    return RuntimeError(
        "backward(): the losses do not depend on the sampler's parameters: compute "
        "them from the model that was given to record()"
    )
