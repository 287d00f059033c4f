"""Sums of gradients that have the same bits on any number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from xla_replica.backends.gradient_sum import GradientSum
from xla_replica.backends.grid import Divisor, Grid, Total
from xla_replica.backends.replica import Replica


class ExactSum(GradientSum):
    """Adds the gradients of every minibatch as integers on a grid.

    Between two minibatches ``.grad`` is None, and after a backward pass it is the
    gradient of that minibatch alone.

    Args:
        replica, may_begin: See `GradientSum`.
        grid: The units of the gradients.
        names: A parameter's name in the grid.
    """

    def __init__(
        self,
        replica: Replica,
        may_begin: Callable[[], bool],
        grid: Grid,
        names: Mapping[nn.Parameter, str],
    ) -> None:
        super().__init__(replica, may_begin)
        self._grid, self._names = grid, names
        self._totals: dict[nn.Parameter, Total] = {}
        self._divisor: Divisor = None

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        gradients, totals = self.gradients, self._totals
        for p in parameters:
            if p not in gradients:
                gradients[p] = torch.zeros_like(p.detach())
                totals[p] = Total(self._grid, self._names[p], p)
        self.gradients = {p: gradients[p] for p in parameters}
        self._totals = {p: totals[p] for p in parameters}

    def use_zeros(self) -> None:
        pass  # totals are zero

    def end_minibatch(self) -> None:
        for parameter, total in self._totals.items():
            total.add_(parameter.grad)
            parameter.grad = None

    def sum_(self, others: Sequence[torch.Tensor], divisor: Divisor) -> None:
        self._divisor = divisor
        totals = [part for total in self._totals.values() for part in total.parts]
        self._replica.all_reduce_([*totals, *others])

    def finish(self) -> None:
        for parameter, gradient in self.gradients.items():
            self._totals[parameter].mean_into_(gradient, self._divisor)
            parameter.grad = gradient

    def clear(self) -> None:
        for parameter, total in self._totals.items():
            parameter.grad = None
            total.zero_()
