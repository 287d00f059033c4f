"""Sums of gradients that have the same bits on any number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from xla_replica.backends.gradient_sum import GradientSum
from xla_replica.backends.grid import Total
from xla_replica.backends.replica import Replica


class ExactSum(GradientSum):
    """Adds the gradients of every minibatch as integers on a grid.

    Between two minibatches ``.grad`` is None, and after a backward pass it is the
    gradient of that minibatch alone.

    Args:
        replica, may_begin: See `GradientSum`.
        exact: It has a ``grid``, ``names`` of parameters in it, and a list of
            ``riders``, of which this becomes one: all their totals are among the others
            of `sum_`.
    """

    def __init__(
        self, replica: Replica, may_begin: Callable[[], bool], exact: Any
    ) -> None:
        super().__init__(replica, may_begin)
        self._grid, self._names = exact.grid, exact.names
        self.totals: list[Total] = []
        self._divisor: int | torch.Tensor | None = None
        exact.riders.append(self)

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        self.gradients = {p: torch.zeros_like(p.detach()) for p in parameters}
        self.totals = [Total(self._grid, self._names[p], p) for p in parameters]

    def use_zeros(self) -> None:
        pass  # totals are zero

    def end_minibatch(self) -> None:
        for parameter, total in zip(self.gradients, self.totals):
            total.add_(parameter.grad)
            parameter.grad = None

    def sum_(self, others: Sequence[torch.Tensor], divisor: Any) -> None:
        self._divisor = divisor
        self._replica.all_reduce_(others)

    def commit(self, num_minibatches: Any) -> None:
        del num_minibatches  # weighted ones have another divisor
        for (parameter, gradient), total in zip(self.gradients.items(), self.totals):
            parameter.grad = total.mean_into_(gradient, self._divisor)

    def clear(self) -> None:
        for parameter in self.gradients:
            parameter.grad = None
