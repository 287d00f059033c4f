"""Which samples of an order a replica runs: plain integers."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class RoundRobinSharding:
    """Deals an order to replicas one group at a time, like playing cards.

    Replica r runs the groups at positions r, r + W, r + 2W ..., so that a step of B
    groups on each of W replicas completes the next W B groups of the order, whatever B
    and W are. Unless the order is one of groups, a group is a sample.

    ``drop_last`` leaves out the last groups that do not fill a round. Otherwise they
    are followed by repetitions of the first ones, whose gradients are not balanced. If
    ``group_size`` does not divide ``num_samples``, the samples of the smaller group at
    the end are dealt one at a time, and are not balanced either.
    """

    num_samples: int
    num_replicas: int
    rank: int
    drop_last: bool = False
    group_size: int = 1

    @property
    def num_groups(self) -> int:
        """The number of whole groups."""
        return self.num_samples // self.group_size

    @property
    def num_remaining(self) -> int:
        """How many samples of the smaller group at the end every replica runs."""
        return self._of_remainder.length(0) if self.group_size > 1 else 0

    @property
    def _of_remainder(self) -> RoundRobinSharding:
        remainder = self.num_samples % self.group_size
        return dataclasses.replace(self, num_samples=remainder, group_size=1)

    def end(self, start: int) -> int:
        """Returns the end of the positions that a pass from ``start`` uses."""
        if not self.drop_last:
            return self.num_groups
        left = self.num_groups - start
        return start + left // self.num_replicas * self.num_replicas

    def length(self, start: int) -> int:
        """Returns how many samples every replica runs in a pass from ``start``."""
        return self._num_own(start) * self.group_size + self.num_remaining

    def _num_own(self, start: int) -> int:
        return -(-(self.end(start) - start) // self.num_replicas)

    def own(self, order: np.ndarray, start: int) -> np.ndarray:
        """Returns this replica's samples from position ``start``, ``(length,)`` int64.

        >>> order = np.array([3, 1, 4, 0, 2])
        >>> RoundRobinSharding(5, 2, 0).own(order, 0)
        array([3, 4, 2])
        >>> RoundRobinSharding(5, 2, 1).own(order, 0)
        array([1, 0, 3])
        >>> RoundRobinSharding(5, 2, 1, group_size=2).own(order, 0)
        array([4, 0, 2])
        """
        size, end = self.group_size, self.end(start)
        positions = self.rank + np.arange(self._num_own(start)) * self.num_replicas
        groups = order[: self.num_groups * size].reshape(-1, size)
        used = np.concatenate([groups[start:end], groups])
        dealt = used[positions % len(used)].reshape(-1)
        if not self.num_remaining:
            return dealt
        remaining = self._of_remainder.own(order[self.num_groups * size :], 0)
        return np.concatenate([dealt, remaining])
