"""Squared norms of gradients: of every minibatch, and of successive steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from variable_batch_size.gradient_noise import estimators
from xla_replica import Replica, traits
from xla_replica.device.gradients import weak_hook

Groups = list[dict[str, Any]]


class GradientSquares:
    """Sees every gradient inside the backward pass, before it is accumulated.

    It keeps the squared norm of each, added up in ``dtype``, and no copy.

    Attributes:
        parameters: Those whose gradients are seen.
        paused: Whether gradients are let pass unseen.
    """

    def __init__(self, dtype: torch.dtype, replica: Replica) -> None:
        self.dtype = dtype
        self.device = replica.device
        self._replica = replica
        self.parameters: list[nn.Parameter] = []
        self._group_of: list[int] = []
        self._known: set[nn.Parameter] = set()
        self._num_groups = 0
        self._handles: list[Any] = []
        self._collected: dict[int, torch.Tensor] = {}
        self._repeated = False
        self.paused = False

    def watch(self, groups: Groups) -> list[nn.Parameter]:
        """Sees all trainable parameters from now on; returns those that are new."""
        new = []
        self._num_groups = len(groups)
        for group_index, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._known:
                    # The garbage collector cannot see what a node keeps.
                    hook = weak_hook(self.collect, len(self.parameters))
                    self._handles.append(self._replica.on_gradient(parameter, hook))
                    self._known.add(parameter)
                    self.parameters.append(parameter)
                    self._group_of.append(group_index)
                    new.append(parameter)
        return new

    def collect(self, index: int, gradient: torch.Tensor) -> None:
        """Keeps the square of a gradient of this minibatch."""
        if self.paused:
            return
        if index in self._collected and self.parameters[index].grad is not None:
            self._repeated = True  # else the one before was thrown away
        if gradient.requires_grad:  # of backward(create_graph=True)
            gradient = gradient.detach()
        self._collected[index] = square(gradient, self.dtype)

    def take(self) -> torch.Tensor | None:
        """Returns the minibatch's squares, ``(G,)``, once; None without gradients."""
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
        """Forgets gradients that are no longer in ``.grad``."""
        self._collected = {
            index: value
            for index, value in self._collected.items()
            if self.parameters[index].grad is not None
        }

    def discard(self) -> None:
        """Forgets the minibatch."""
        self._collected, self._repeated = {}, False

    def gradients(self) -> dict[int, torch.Tensor]:
        """Returns what ``.grad`` holds here now, by the parameter's index."""
        return {
            index: self._replica.local(parameter.grad)
            for index, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }

    def of_gradients(self) -> torch.Tensor:
        """Returns ||gradient||^2 of what ``.grad`` holds now, by group: ``(G,)``."""
        gradients = self.gradients()
        found = squares(list(gradients.values()), self.dtype)
        return self.whole_by_group(dict(zip(gradients, found)))

    def whole_by_group(self, numbers: dict[int, torch.Tensor]) -> torch.Tensor:
        """Returns `by_group` of sums over what `gradients` has returned."""
        parameters = [self.parameters[index] for index in numbers]
        sums = self._replica.sum_over_shards([*numbers.values()], parameters)
        return self.by_group(dict(zip(numbers, sums)))

    def zeros_like(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Returns zeros like what `gradients` returns of these parameters."""
        return [torch.zeros_like(self._replica.local(p)).detach() for p in parameters]

    def by_group(self, numbers: dict[int, torch.Tensor]) -> torch.Tensor:
        """Returns the sums of 0-d tensors over each parameter group: ``(G,)``."""
        members: list[list[torch.Tensor]] = [[] for _ in range(self._num_groups)]
        for index in sorted(numbers):  # one order, whatever the backward pass's was
            members[self._group_of[index]].append(numbers[index])
        sums = [torch.stack(each).sum(0, keepdim=True) for each in members if each]
        if len(sums) == 1 == self._num_groups:
            return sums[0]
        nothing = torch.zeros(1, dtype=self.dtype, device=self.device)
        found = iter(sums)
        return torch.cat([next(found) if each else nothing for each in members])


class GradientDifferences:
    """Compares each step of one minibatch with the one before; keeps a copy of it.

    For runs of one minibatch a step, which have no variance within a step. The
    statistics are `averages`, ``(3, G)``.
    """

    def __init__(self, gradients: GradientSquares, minibatch_size: int) -> None:
        dtype, device = gradients.dtype, gradients.device
        self.averages = estimators.no_statistics(0, dtype, device)
        self._gradients = gradients
        self._minibatch_size = minibatch_size
        self._previous: list[torch.Tensor] = []
        self._previous_square = self.averages[1]
        self._previous_is_single = False

    def forget(self) -> None:
        """Compares with no step before, because it had other parameters."""
        self._previous_is_single = False

    def add_parameters(self, new: Sequence[nn.Parameter]) -> None:
        """Makes room for new parameters."""
        self._previous += self._gradients.zeros_like(new)

    def add_groups(self, num_new: int) -> None:
        """Makes room for new parameter groups, of which nothing is known."""
        self.averages = estimators.with_new_groups(self.averages, num_new)
        zeros = self._previous_square.new_zeros(num_new)
        self._previous_square = torch.cat([self._previous_square, zeros])

    def weight(self, num_minibatches: int, time_constant: float) -> float:
        """Returns the coming step's weight: two single ones count as one minibatch."""
        single = num_minibatches == 1
        counts = single and self._previous_is_single
        self._previous_is_single = single
        return -math.expm1(-1 / time_constant) if counts else 0.0

    def update(self, mean_square: torch.Tensor, weight: torch.Tensor) -> None:
        """Takes in the step whose averaged gradients are in ``.grad``."""
        gradients = self._gradients.gradients()
        product = self._gradients.whole_by_group(
            {
                index: inner_product(gradient, self._previous[index], mean_square.dtype)
                for index, gradient in gradients.items()
            }
        )
        new = estimators.estimate_from_differences(
            mean_square, self._previous_square, product, self._minibatch_size
        )
        self.averages = estimators.average(self.averages, new, weight)
        self._previous_square = mean_square
        for index, gradient in gradients.items():
            self._previous[index].copy_(gradient)


def squares(gradients: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns `square` of each, in a few kernels where nothing is compiled."""
    plain = all(
        not (g.is_sparse or g.is_complex() or traits(g).is_lazy) for g in gradients
    )
    if not (gradients and plain):
        return [square(gradient, dtype) for gradient in gradients]
    norms = torch._foreach_norm(gradients, 2, dtype)
    return list(torch._foreach_mul(norms, norms))


def square(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ||gradient||^2, 0-d, added up in ``dtype``."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return inner_product(gradient, gradient, dtype)


def inner_product(
    one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the real part of <one, other>, 0-d, added up in ``dtype``."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    # Not a dot product, which a TPU computes from bfloat16 factors; and not a norm,
    # which XLA makes three times as many operations of.
    return (one.to(dtype) * other.to(dtype)).sum()
