"""Squared norms of gradients: of every minibatch, and of what a step has summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from xla_replica import Replica
from xla_replica.device.gradients import weak_hook
from xla_replica.device.sharded import whole

Groups = list[dict[str, Any]]


class GradientSquares:
    """Sees every gradient inside the backward pass, before it is accumulated.

    It keeps the squared norm of each, added up in ``dtype``, and no copy.

    Args:
        is_exact: Whether squares must not depend on how parameters are sharded.

    Attributes:
        parameters: Those whose gradients are seen.
        paused: Whether gradients are let pass unseen.
    """

    def __init__(self, dtype: torch.dtype, replica: Replica, is_exact: bool) -> None:
        self.dtype, self._is_exact = dtype, is_exact
        self._replica, self._is_lazy = replica, replica.is_lazy
        self.parameters: list[nn.Parameter] = []
        self._group_of: dict[nn.Parameter, int] = {}
        self._num_groups = 0
        self._handles: list[Any] = []
        self._collected: dict[int, torch.Tensor] = {}
        self.paused = self._is_sharded = False

    def watch(self, groups: Groups) -> bool:
        """Sees all trainable parameters from now on; returns whether some are new."""
        num_before, self._num_groups = len(self.parameters), len(groups)
        for group_index, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._group_of:
                    # The garbage collector cannot see what a node keeps.
                    hook = weak_hook(self.collect, len(self.parameters))
                    self._handles.append(self._replica.on_gradient(parameter, hook))
                    self.parameters.append(parameter)
                    self._group_of[parameter] = group_index
        self._is_sharded = self._replica.is_sharded(self.parameters)
        return len(self.parameters) > num_before

    def collect(self, index: int, gradient: torch.Tensor) -> None:
        """Keeps the square of a gradient of this minibatch; raises for a second one."""
        if self.paused:
            return
        # Else the one before was thrown away.
        if index in self._collected and self.parameters[index].grad is not None:
            raise ValueError(
                "a parameter received two gradients within one minibatch: call "
                "backward() once per step(), and checkpoint with use_reentrant=False"
            )
        if gradient.requires_grad:  # of backward(create_graph=True)
            gradient = gradient.detach()
        self._collected[index] = square(gradient, self.dtype)

    def take(self) -> torch.Tensor | None:
        """Returns the minibatch's squares, ``(G,)``, once; None without gradients.

        Gradients that `model.zero_grad` has thrown away meanwhile do not count.
        """
        found, self._collected = self._collected, {}
        kept = {i: v for i, v in found.items() if self.parameters[i].grad is not None}
        return self.by_group(kept) if kept else None

    def discard(self) -> None:
        """Forgets the minibatch."""
        self._collected = {}

    def of_gradients(self) -> torch.Tensor:
        """Returns ||gradient||^2 of what ``.grad`` holds now, by group: ``(G,)``."""
        indices = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        parameters: Any = [self.parameters[index] for index in indices]
        gradients = [parameter.grad for parameter in parameters]
        if not self._is_sharded:
            sums = self._squares(gradients)
        elif self._is_exact:  # one whole gradient after another
            sums = [self._squares([whole(each)])[0] for each in gradients]
        else:
            sums = self._squares([self._replica.local(each) for each in gradients])
            sums = self._replica.sum_over_shards(sums, parameters)
        return self.by_group(dict(zip(indices, sums)))

    def _squares(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns `square` of each, in a few kernels where nothing is compiled."""
        special = any(g.is_sparse or g.is_complex() for g in gradients)
        if special or self._is_lazy or not gradients:
            return [square(gradient, self.dtype) for gradient in gradients]
        norms = torch._foreach_norm(gradients, 2, self.dtype)
        return list(torch._foreach_mul(norms, norms))

    def by_group(self, numbers: dict[int, torch.Tensor]) -> torch.Tensor:
        """Returns the sums of 0-d tensors over each parameter group: ``(G,)``."""
        members: list[list[torch.Tensor]] = [[] for _ in range(self._num_groups)]
        for index in sorted(numbers):  # one order, whatever the backward pass's was
            members[self._group_of[self.parameters[index]]].append(numbers[index])
        sums = [torch.stack(each).sum(0, keepdim=True) for each in members if each]
        if len(sums) == 1 == self._num_groups:
            return sums[0]
        nothing = torch.zeros(1, dtype=self.dtype, device=self._replica.device)
        found = iter(sums)
        return torch.cat([next(found) if each else nothing for each in members])


def square(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ||gradient||^2, 0-d, added up in ``dtype``."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    gradient = gradient.to(dtype)
    # Not a dot product, which a TPU computes from bfloat16 factors; and not a norm,
    # which XLA makes three times as many operations of.
    return (gradient * gradient).sum()
