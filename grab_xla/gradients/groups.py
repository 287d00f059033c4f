"""The gradient of a fixed group of samples, out of any model's backward pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import xla_replica
from xla_replica.common.arguments import check_choice


def parameters_of(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, nn.Parameter]:
    """Returns the model's parameters of these names and shapes.

    Raises:
        ValueError: The model has no such parameter, or it is frozen.
    """
    found = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    wrong = [
        name
        for name, shape in shapes.items()
        if name not in found or found[name].shape != shape
    ]
    if wrong:
        raise ValueError(
            f"record: {', '.join(wrong[:5])} are not trainable parameters of the "
            "model, of the same shapes; build the sampler with those of the model "
            "that is recorded"
        )
    return {name: found[name] for name in shapes}


def group_gradients(
    parameters: Mapping[str, nn.Parameter], losses: Tensor, reduction: str
) -> dict[str, Tensor]:
    """Returns what the backward pass of a group adds to ``.grad``, by name.

    Gradients, ``(1, *shape)``, are taken from hooks, before they are added. So what
    other groups have left in ``.grad``, and sums over replicas in the same backward
    pass, do not matter. The hooks are there during the pass alone.

    Raises:
        RuntimeError: The losses do not depend on the parameters.
        ValueError: ``reduction`` is not allowed.
    """
    # Autograd copies a gradient that somebody keeps before it adds to it.
    kept: dict[str, list[Tensor]] = {name: [] for name in parameters}
    handles = [p.register_hook(kept[name].append) for name, p in parameters.items()]
    try:
        add_gradient(losses, reduction)
    finally:
        for handle in handles:
            handle.remove()
    if not any(kept.values()):
        raise of_another_model()
    return {n: _sum(p, kept[n]).unsqueeze(0) for n, p in parameters.items()}


def _sum(parameter: Tensor, gradients: list[Tensor]) -> Tensor:
    """Returns the sum of a parameter's gradients, zeros if there is none.

    There are several where a backward pass runs within the pass.
    """
    if not gradients:
        return torch.zeros_like(parameter)
    total, *others = gradients
    for each in others:
        total = total + each
    return total.detach().to_dense() if total.is_sparse else total.detach()


def add_gradient(losses: Tensor, reduction: str) -> None:
    """Adds the gradient of the mean loss, or of the sum, to ``.grad``.

    Raises:
        ValueError: ``reduction`` is not allowed.
    """
    check_choice("reduction", reduction, ("mean", "sum"))
    xla_replica.backward(losses.mean() if reduction == "mean" else losses.sum())


def of_another_model() -> RuntimeError:
    """Returns the error for losses that do not depend on a balanced parameter."""
    return RuntimeError(
        "backward(): the losses do not depend on the sampler's parameters: compute "
        "them from the model that was given to record()"
    )
