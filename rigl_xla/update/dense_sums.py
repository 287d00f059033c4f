"""Dense gradients under an optimizer whose sums are exact."""

from __future__ import annotations

from typing import Any

import torch

from rigl_xla.update.steps import TopologySteps
from xla_replica import Replica
from xla_replica.backends.grid import Total


class DenseSums:
    """Adds up dense gradients as integers, so that masks have the same bits everywhere.

    It is what ``optimizer.exact`` calls a rider.

    Args:
        steps: Those of the pruner, which have begun.
        exact: The optimizer's: it has a ``grid``, and ``names`` of parameters in it.
        replica: Where it is lazy, steps that collect and others are one program.
    """

    def __init__(self, steps: TopologySteps, exact: Any, replica: Replica) -> None:
        self._steps, self._exact, self._is_lazy = steps, exact, replica.is_lazy
        parameters = [layer.weight.parameter for layer in steps.layers]
        self._names = [f"dense {exact.names[each]}" for each in parameters]
        exact.grid.extend(self._names)
        self.clear()
        exact.riders.append(self)
        replica.sync()  # zeros on the device, not in the first graph

    def remove(self) -> None:
        """Ends the sums, as the handle of a hook does."""
        self._exact.riders.remove(self)

    @property
    def totals(self) -> list[Total]:
        """The sums that replicas add up in this step."""
        return self._totals if self._steps.collects else []

    def end_minibatch(self) -> None:
        """Adds what a minibatch has left pending."""
        for layer, total in zip(self._steps.layers, self._totals):
            total.add_(layer.take_pending())

    def commit(self, num_minibatches: Any) -> None:
        """Makes the sums pending: not means, as without exact sums."""
        del num_minibatches
        for layer, total in zip(self._steps.layers, self.totals):
            layer.pending = total.mean_into_(torch.empty_like(layer.data))

    def clear(self) -> None:
        """Forgets a minibatch; makes totals for the next step, if it has any."""
        layers = self._steps.layers
        for layer in layers:
            layer.take_pending()
        named = zip(
            self._names, layers if self._steps.collects or self._is_lazy else []
        )
        self._totals = [Total(self._exact.grid, n, layer.data) for n, layer in named]
