"""Squared norms of every minibatch's gradients, without keeping a copy of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Groups = list[dict[str, Any]]


class GradientSquares:
    """Sees every gradient inside the backward pass, before it is accumulated.

    Args:
        dtype: What squares are added up in.
        device: Where the parameters are.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device
        self._parameters: list[nn.Parameter] = []
        self._group_of: list[int] = []
        self._known: set[nn.Parameter] = set()
        self._num_groups = 0
        # The nodes that accumulate gradients, kept because parameters do not keep them.
        self._nodes: list[Any] = []
        self._collected: dict[int, torch.Tensor] = {}
        self._repeated = False

    def watch(self, groups: Groups) -> list[nn.Parameter]:
        """Sees the gradients of all trainable parameters from now on.

        Returns:
            The parameters that were not known before.
        """
        new = []
        self._num_groups = len(groups)
        for group_index, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._known:
                    self._known.add(parameter)
                    self._hook(parameter)
                    self._group_of.append(group_index)
                    new.append(parameter)
        return new

    def _hook(self, parameter: nn.Parameter) -> None:
        # On the node, not the tensor: torch.autograd.grad does not run it, and hooks of
        # the tensor have had their say.
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_prehook(_collector(weakref.ref(self), len(self._parameters)))
        self._nodes.append(node)
        self._parameters.append(parameter)

    def collect(self, index: int, gradient: torch.Tensor) -> None:
        """Takes note of a gradient of this minibatch."""
        if index in self._collected and self._parameters[index].grad is not None:
            self._repeated = True  # else the one before was thrown away
        if gradient.requires_grad:  # of backward(create_graph=True)
            gradient = gradient.detach()
        self._collected[index] = square(gradient, self.dtype)

    def take(self) -> torch.Tensor | None:
        """``(G,)``: the squares of the minibatch, once; None if it had no gradients.

        Raises:
            ValueError: The minibatch had several backward passes.
        """
        collected, repeated = self._collected, self._repeated
        self.discard()
        if repeated:
            raise ValueError(
                "a parameter received two gradients within one minibatch, so the "
                "square of their sum is not known: call backward() once per step(), on "
                "the sum of the losses (and checkpoint with use_reentrant=False). To "
                "throw gradients away, model.zero_grad(set_to_none=True)"
            )
        return self.by_group(collected) if collected else None

    def drop_discarded(self) -> None:
        """Forgets what no longer stands in ``.grad``."""
        self._collected = {
            index: value
            for index, value in self._collected.items()
            if self._parameters[index].grad is not None
        }

    def discard(self) -> None:
        """Forgets the minibatch."""
        self._collected, self._repeated = {}, False

    def gradients(self) -> dict[int, torch.Tensor]:
        """What stands in ``.grad``, by the parameter's index."""
        return {
            index: parameter.grad
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }

    def of_gradients(self) -> torch.Tensor:
        """``(G,)``: ||gradient||^2 of what stands in ``.grad``, by group."""
        gradients = self.gradients().items()
        return self.by_group({i: square(g, self.dtype) for i, g in gradients})

    def by_group(self, numbers: dict[int, torch.Tensor]) -> torch.Tensor:
        """``(G,)``: sums over each parameter group of 0-d tensors by index."""
        members: list[list[torch.Tensor]] = [[] for _ in range(self._num_groups)]
        for index in sorted(numbers):  # one order, whatever the backward pass's was
            members[self._group_of[index]].append(numbers[index])
        sums = [torch.stack(each).sum(0, keepdim=True) for each in members if each]
        if len(sums) == 1 == self._num_groups:
            return sums[0]
        nothing = torch.zeros(1, dtype=self.dtype, device=self._device)
        found = iter(sums)
        return torch.cat([next(found) if each else nothing for each in members])


def square(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """||gradient||^2, 0-d, added up in ``dtype``."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return inner_product(gradient, gradient, dtype)


def inner_product(
    one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The real part of <one, other>, 0-d, added up in ``dtype``."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    # Not a dot product, which a TPU computes from bfloat16 factors; and not a norm,
    # which XLA makes three times as many operations of.
    return (one.to(dtype) * other.to(dtype)).sum()


def _collector(
    squares: weakref.ref[GradientSquares], index: int
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """A hook that keeps nothing alive: the garbage collector cannot see into a node."""

    def hook(gradients: Sequence[torch.Tensor | None]) -> None:
        owner = squares()
        if owner is not None and gradients[0] is not None:
            owner.collect(index, gradients[0])

    return hook
