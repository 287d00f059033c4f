"""Dense gradients under an optimizer whose sums are exact."""

from __future__ import annotations

from typing import Any

import torch

from rigl_xla.update.steps import TopologySteps


class DenseSums:
    """Adds up dense gradients as integers, so that masks have the same bits everywhere.

    It is what ``optimizer.exact`` calls a rider.

    Args:
        steps: Those of the pruner, which have begun.
        exact: The optimizer's: it has a ``grid``, and the ``rows`` of parameters in it.
        is_lazy: Whether to make one program of steps that collect and others.
    """

    def __init__(self, steps: TopologySteps, exact: Any, is_lazy: bool) -> None:
        self._steps, self._exact, self._is_lazy = steps, exact, is_lazy
        self._grid = grid = exact.grid
        rows = [exact.rows[layer.weight.parameter] for layer in steps.layers]
        names = [f"dense {grid.names[row]}" for row in rows]
        grid.extend([name for name in names if name not in grid.names])
        self._rows = [grid.names.index(name) for name in names]
        self.clear()
        exact.add_rider(self)

    def remove(self) -> None:
        """Ends the sums, as the handle of a hook does."""
        self._exact.riders.remove(self)

    def totals(self) -> list[list[torch.Tensor]]:
        """Returns the sums that replicas add up in this step."""
        return self._totals if self._steps.collects else []

    def end_minibatch(self) -> None:
        """Adds what a minibatch has left pending."""
        for layer, row, total in zip(self._steps.layers, self._rows, self._totals):
            self._grid.add_(total, layer.take_pending(), row)

    def commit(self, num_minibatches: Any) -> None:
        """Makes the sums pending: not means, as without exact sums."""
        del num_minibatches
        for layer, row, total in zip(self._steps.layers, self._rows, self.totals()):
            layer.pending = torch.empty_like(layer.data)
            self._grid.mean_into_(layer.pending, total, row)

    def clear(self) -> None:
        """Forgets the step; makes zeros for the next one."""
        for layer in self._steps.layers:
            layer.take_pending()
        kept = self._steps.layers if self._steps.collects or self._is_lazy else []
        self._totals = [self._grid.empty_total(layer.data) for layer in kept]
