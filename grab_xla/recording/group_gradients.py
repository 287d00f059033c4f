"""The gradient of a fixed group of samples, out of any model's backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import xla_replica
from grab_xla.balancers import Ordering
from xla_replica import traits
from xla_replica.common.arguments import check_choice

# So many numbers take less time to be copied into one row than to be visited where
# they are, parameter after parameter: 4 MiB in float32.
COPIED = 2**20


class GroupGradients:
    """What ``fidelity="group"`` balances: what a backward pass adds to ``.grad``.

    It is taken from hooks, before it is added. So what other groups have left in
    ``.grad``, and sums over replicas in the same backward pass, do not matter.

    Args:
        parameters: The parameters, by name.

    Attributes:
        balanced: Tensors of the shapes of what is balanced, by name.
    """

    projection = None

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.balanced = parameters
        self._parameters: dict[str, nn.Parameter] | None = None
        values = list(parameters.values())
        size = sum(value.numel() for value in values)
        self._is_copied = size <= COPIED and all(traits(v).is_host for v in values)

    def start(
        self, model: nn.Module, options: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context that does nothing, and keeps the model's parameters.

        ``options`` are those of a capture, which a group does not need.

        Raises:
            ValueError: The model has no such parameter, or it is frozen.
        """
        del options
        found = {name: _parameter(model, name) for name in self.balanced}
        wrong = [
            name
            for name, parameter in found.items()
            if parameter is None or not parameter.requires_grad
        ]
        if wrong:
            raise ValueError(
                f"record: {', '.join(wrong[:5])} are not trainable parameters of the "
                "model; build the sampler with those of the model that is recorded"
            )
        self._parameters = {n: p for n, p in found.items() if p is not None}
        return contextlib.nullcontext()

    def backward(
        self,
        losses: Tensor,
        reduction: str = "mean",
        taker: Ordering | None = None,
        from_samples: bool = False,
    ) -> dict[str, Tensor] | Tensor:
        """Runs the backward pass of the mean loss, or of the sum.

        Returns:
            The gradient of that, ``(1, *shape)`` by name, or ``(1, columns)``.

        Raises:
            RuntimeError: `start` was not called for this forward pass.
            ValueError: ``reduction`` is not allowed.
        """
        del taker, from_samples  # There is one row, of the pass's own gradient.
        if self._parameters is None:
            raise RuntimeError(
                "backward() without record(): compute the losses inside "
                "`with sampler.record(model):`, once for every backward()"
            )
        parameters, self._parameters = self._parameters, None
        with _kept(parameters) as found:
            add_gradient(losses, reduction)
        sums = {name: _sum(parameters[name], each) for name, each in found.items()}
        if self._is_copied:
            return torch.cat([each.flatten() for each in sums.values()]).unsqueeze(0)
        return {name: each.unsqueeze(0) for name, each in sums.items()}


def _parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    """Returns the parameter that `named_parameters` gives this name, None if none."""
    *path, last = name.split(".")
    module: nn.Module | None = model
    for part in path:
        if module is not None:
            module = module._modules.get(part)
    return None if module is None else module._parameters.get(last)


def add_gradient(losses: Tensor, reduction: str) -> None:
    """Adds the gradient of the mean loss, or of the sum, to ``.grad``.

    Raises:
        ValueError: ``reduction`` is not allowed.
    """
    check_choice("reduction", reduction, ("mean", "sum"))
    xla_replica.backward(losses.mean() if reduction == "mean" else losses.sum())


@contextlib.contextmanager
def _kept(
    parameters: Mapping[str, nn.Parameter],
) -> Iterator[dict[str, list[Tensor]]]:
    """Keeps every gradient that comes to a parameter inside the context.

    Autograd copies a gradient that somebody keeps before it adds to it, so that no
    other copy is needed, and no Python runs in the pass.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in parameters}
    handles = [
        parameter.register_hook(found[name].append)
        for name, parameter in parameters.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _sum(parameter: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    """Returns the sum of what came to a parameter, of which nothing may have come."""
    if not gradients:  # the losses do not depend on it
        return torch.zeros_like(parameter)
    total, *others = gradients  # several, where a pass runs within the pass
    for each in others:
        total = total + each
    return total.detach().to_dense() if total.is_sparse else total.detach()
