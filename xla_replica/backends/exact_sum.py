"""Sums of gradients that have the same bits on any number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from xla_replica.backends.gradient_sum import GradientSum
from xla_replica.backends.grid import Divisor, Grid, zero_
from xla_replica.backends.replica import Replica


class ExactSum(GradientSum):
    """Adds the gradients of every minibatch as integers on a grid.

    Between two minibatches ``.grad`` is None, and after a backward pass it is the
    gradient of that minibatch alone.

    Args:
        replica, may_begin: See `GradientSum`.
        grid: The units of the gradients.
        rows: A parameter's row in the grid.
    """

    def __init__(
        self,
        replica: Replica,
        may_begin: Callable[[], bool],
        grid: Grid,
        rows: Mapping[nn.Parameter, int],
    ) -> None:
        super().__init__(replica, may_begin)
        self._grid, self._rows = grid, rows
        self._totals: dict[nn.Parameter, list[torch.Tensor]] = {}
        self._divisor: Divisor = None

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        before = self.gradients
        self.gradients = {
            p: before[p] if p in before else torch.zeros_like(p.detach())
            for p in parameters
        }
        self._totals = {
            p: self._totals.get(p) or self._grid.empty_total(p) for p in parameters
        }

    def use_zeros(self) -> None:
        pass  # totals are zero

    def end_minibatch(self) -> None:
        for parameter, total in self._totals.items():
            self._grid.add_(total, parameter.grad, self._rows[parameter])
            parameter.grad = None

    def sum_(self, others: Sequence[torch.Tensor], divisor: Divisor) -> None:
        self._divisor = divisor
        totals = [tensor for total in self._totals.values() for tensor in total]
        self._replica.all_reduce_([*totals, *others])

    def finish(self) -> None:
        for parameter, gradient in self.gradients.items():
            total, row = self._totals[parameter], self._rows[parameter]
            self._grid.mean_into_(gradient, total, row, self._divisor)
            parameter.grad = gradient

    def clear(self) -> None:
        for parameter in self._totals:
            parameter.grad = None
        zero_(self._totals.values())
