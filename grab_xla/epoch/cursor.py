"""Where a replica is in the order of an epoch."""

from __future__ import annotations

import numpy as np

from grab_xla.epoch.round_robin_sharding import RoundRobinSharding


class Cursor:
    """Which samples of an order a replica runs next.

    It deals the order itself, or another sampler does: then replica r runs the r-th of
    every W minibatches of a step. Positions in the order are those of groups; unless
    the order is one of groups, a group is a sample.

    Attributes:
        start: The position at which the pass over the order began.
        resumed: Whether that is in the middle of an epoch, which a state restored.
        given_for: The epoch whose whole order another sampler was given; None if no
            order was given.
    """

    def __init__(self, sharding: RoundRobinSharding, order: np.ndarray) -> None:
        self._sharding = sharding
        self.begin()
        self.given_for: int | None = None
        self._own = sharding.own(order, 0)

    def begin(self) -> None:
        """Begins an epoch."""
        self.start, self.resumed = 0, False
        self._end = self._sharding.end(0)

    def deal(self, order: np.ndarray) -> list[int]:
        """Returns the samples of this replica in a pass over the rest of the order."""
        self._own = self._sharding.own(order, self.start)
        return self._own.tolist()

    def give(self, epoch: int) -> None:
        """Leaves the dealing of the epoch's whole order to another sampler."""
        self.begin()
        self.given_for = epoch

    def restore(self, num_seen: int, given_for: int | None, order: np.ndarray) -> None:
        """Continues after so many groups, or after a finished epoch."""
        self.given_for = given_for
        end = self._sharding.end(0) + (self._sharding.num_remaining > 0)
        self.resumed = 0 < num_seen < end
        self.start = num_seen if self.resumed else 0
        self._end = self._sharding.end(self.start)
        self._own = self._sharding.own(order, self.start)

    def __len__(self) -> int:
        """Returns how many samples this replica runs in a pass."""
        return self._sharding.length(self.start)

    def left(self, num_seen: int) -> int:
        """Returns how many whole groups of the pass are left on all replicas."""
        return self._end - num_seen

    def next_samples(
        self, order: np.ndarray, num_seen: int, num_pending: int, num_groups: int
    ) -> np.ndarray:
        """Returns the next samples that this replica runs, as many as there are.

        Args:
            order: The whole order.
            num_seen: How many groups all replicas have run.
            num_pending: How many minibatches of this replica wait for their update.
            num_groups: How many groups are asked for: a minibatch if order is given.
        """
        sharding, size = self._sharding, self._sharding.group_size
        if self.given_for is None:
            first, own = -(-(num_seen - self.start) // sharding.num_replicas), self._own
            if num_seen > self._end:  # the smaller group at the end is done, too
                first = len(own)
        else:
            turn = num_pending * sharding.num_replicas + sharding.rank
            first, own = num_seen + turn * num_groups, order
        return own[first * size : (first + num_groups) * size]
