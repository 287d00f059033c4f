"""Which samples of an order a replica runs: plain integers."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Dealing:
    """Deals an order to replicas one sample at a time, as card players do.

    Replica r runs the samples at positions r, r + W, r + 2W ..., so that after a step
    of B samples on each of W replicas the next W B samples of the order are done,
    whatever B and W are.

    Attributes:
        num_samples: n, length of the order.
        num_replicas: W.
        rank: Of this replica.
        drop_last: What happens to the last ``n mod W`` samples: left out, or followed
            by repetitions of the first ones, whose gradients nobody balances.
    """

    num_samples: int
    num_replicas: int
    rank: int
    drop_last: bool = False

    def end(self, start: int) -> int:
        """Behind the last position that a pass from position ``start`` uses."""
        if not self.drop_last:
            return self.num_samples
        left = self.num_samples - start
        return start + left // self.num_replicas * self.num_replicas

    def length(self, start: int) -> int:
        """Samples that every replica runs in a pass from position ``start``."""
        return -(-(self.end(start) - start) // self.num_replicas)

    def own(self, order: np.ndarray, start: int) -> np.ndarray:
        """``(length,)`` int64: this replica's samples from position ``start`` on.

        >>> order = np.array([3, 1, 4, 0, 2])
        >>> Dealing(5, 2, 0).own(order, 0), Dealing(5, 2, 1).own(order, 0)
        (array([3, 4, 2]), array([1, 0, 3]))
        """
        steps = np.arange(self.length(start)) * self.num_replicas
        positions = start + self.rank + steps
        used = np.concatenate([order[start : self.end(start)], order])
        return used[(positions - start) % len(used)]
