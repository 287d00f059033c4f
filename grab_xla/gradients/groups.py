"""The gradient of a fixed group of samples, out of any model's backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import xla_replica
from grab_xla.balancers import Ordering
from xla_replica.common.arguments import check_choice


class GroupGradients:
    """What ``fidelity="group"`` balances: what a backward pass adds to ``.grad``.

    It is taken from hooks, before it is added. So what other groups have left in
    ``.grad``, and sums over replicas in the same backward pass, do not matter. The
    hooks are there during the pass alone.

    Args:
        parameters: The parameters, by name.

    Attributes:
        balanced: Tensors of the shapes of what is balanced, by name.
    """

    projection = None

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.balanced = parameters
        self._recorded: dict[str, nn.Parameter] | None = None

    def record(
        self, model: nn.Module, options: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context that does nothing, and finds the model's parameters.

        ``options`` are those of a capture, which a group does not need.

        Raises:
            ValueError: The model has no such parameter, or it is frozen.
        """
        del options
        found = {
            name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        wrong = [
            name
            for name, parameter in self.balanced.items()
            if name not in found or found[name].shape != parameter.shape
        ]
        if wrong:
            raise ValueError(
                f"record: {', '.join(wrong[:5])} are not trainable parameters of the "
                "model, of the same shapes; build the sampler with those of the model "
                "that is recorded"
            )
        self._recorded = {name: found[name] for name in self.balanced}
        return contextlib.nullcontext()

    def backpropagate(
        self,
        losses: Tensor,
        reduction: str,
        ordering: Ordering | None,
        from_samples: bool,
    ) -> dict[str, Tensor]:
        """Runs the backward pass of the mean loss, or of the sum.

        ``ordering`` and ``from_samples`` are for gradients of samples.

        Returns:
            The gradient of that, ``(1, *shape)`` by name.

        Raises:
            RuntimeError: `record` was not called for this forward pass, or the losses
                do not depend on the parameters.
            ValueError: ``reduction`` is not allowed.
        """
        del ordering, from_samples
        if self._recorded is None:
            raise not_recorded()
        parameters, self._recorded = self._recorded, None
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


def not_recorded() -> RuntimeError:
    """Returns the error for a backward pass without a recorded forward pass."""
    return RuntimeError(
        "backward() without record(): compute the losses inside "
        "`with sampler.record(model):`, once for every backward()"
    )


def of_another_model() -> RuntimeError:
    """Returns the error for losses that do not depend on a balanced parameter."""
    return RuntimeError(
        "backward(): the losses do not depend on the sampler's parameters: compute "
        "them from the model that was given to record()"
    )
