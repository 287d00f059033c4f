"""Which samples of an order a replica runs: plain integers."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class RoundRobinSharding:
    """Deals an order to replicas one sample at a time, like playing cards.

    Replica r runs the samples at positions r, r + W, r + 2W ..., so that a step of B
    samples on each of W replicas completes the next W B samples of the order, whatever
    B and W are.

    ``drop_last`` leaves out the last samples that do not fill a round. Otherwise they
    are followed by repetitions of the first ones, whose gradients are not balanced.
    """

    num_samples: int
    num_replicas: int
    rank: int
    drop_last: bool = False

    def end(self, start: int) -> int:
        """Returns the end of the positions that a pass from ``start`` uses."""
        if not self.drop_last:
            return self.num_samples
        left = self.num_samples - start
        return start + left // self.num_replicas * self.num_replicas

    def length(self, start: int) -> int:
        """Returns how many samples every replica runs in a pass from ``start``."""
        return -(-(self.end(start) - start) // self.num_replicas)

    def own(self, order: np.ndarray, start: int) -> np.ndarray:
        """Returns this replica's samples from position ``start``, ``(length,)`` int64.

        >>> order = np.array([3, 1, 4, 0, 2])
        >>> RoundRobinSharding(5, 2, 0).own(order, 0)
        array([3, 4, 2])
        >>> RoundRobinSharding(5, 2, 1).own(order, 0)
        array([1, 0, 3])
        """
        positions = self.rank + np.arange(self.length(start)) * self.num_replicas
        used = np.concatenate([order[start : self.end(start)], order])
        return used[positions % len(used)]
