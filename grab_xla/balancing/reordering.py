"""Orders as plain integers: how the next one follows, and what a replica runs of one.

The next order is a pure function of this epoch's order and placements. A balancer gives
every visited sample an integer, its placement:

- ``+(leaf + 1)``: to the front of a leaf, after those placed there before;
- ``-(leaf + 1)``: to the back of a leaf, before those placed there before;
- ``0``: the sample keeps its place, because its gradient was not finite.

Balancers without a tree have one leaf, so their placements are the signs of the papers
(Lu, Guo and De Sa, arXiv:2205.10733): the next order is the positives as they came,
then the negatives reversed. Samples that no step saw go to the middle, where the two
meet: at either end they could be the ones that are cut off in every epoch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

KEEP = 0


def reorder(
    order: np.ndarray, placements: np.ndarray, num_leaves: int = 1
) -> np.ndarray:
    """Returns the next order, ``(n,)`` int64, a permutation of the same samples.

    ``placements`` are those of the first m samples of ``order``, ``(m,)``. Unseen
    samples go after the first half of the leaves, or between the signs of a single one.

    >>> reorder(np.array([4, 0, 3, 1, 2]), np.array([1, -1, 1, -1]))
    array([4, 3, 2, 1, 0])
    """
    num_seen = len(placements)
    visited, unseen = order[:num_seen], order[num_seen:]
    moves = np.flatnonzero(placements != KEEP)
    placed = placements[moves].astype(np.int64)
    leaf, negative = np.abs(placed) - 1, placed < 0
    arrival = np.where(negative, -moves, moves)
    moved = visited[moves[np.lexsort((arrival, negative, leaf))]]
    in_front = leaf < num_leaves // 2 if num_leaves > 1 else ~negative
    middle = int(np.count_nonzero(in_front))
    following = np.empty_like(order)
    free = np.ones(len(order), dtype=bool)
    free[:num_seen] = placements != KEEP
    following[~free] = order[~free]
    following[free] = np.concatenate([moved[:middle], unseen, moved[middle:]])
    return following


def reorder_interleaved(
    order: np.ndarray, placements: np.ndarray, num_workers: int
) -> np.ndarray:
    """Returns the next order where worker w owns ``order[w::num_workers]``.

    Each reorders its own samples, as in coordinated balancing (CD-GraB; Cooper et al.,
    arXiv:2302.00845).
    """
    following = np.empty_like(order)
    for worker in range(num_workers):
        own = slice(worker, None, num_workers)
        following[own] = reorder(order[own], placements[own])
    return following


def reorder_by_score(
    order: np.ndarray, scores: np.ndarray, descending: bool
) -> np.ndarray:
    """Returns the samples sorted by score; ties keep their sequence.

    ``scores`` are those of the first m samples of ``order``, ``(m,)``. A sample whose
    score is not finite, or that has none, keeps its place.
    """
    known = np.zeros(len(order), dtype=bool)
    known[: len(scores)] = np.isfinite(scores)
    values = scores[known[: len(scores)]]
    by_score = np.argsort(-values if descending else values, kind="stable")
    following = order.copy()
    following[known] = order[known][by_score]
    return following


def check_permutation(name: str, value: Any, num_samples: int) -> np.ndarray:
    """Returns ``value``, an array, list or tensor, as ``(num_samples,)`` int64.

    Raises:
        ValueError: It is not a permutation of ``range(num_samples)``.
    """
    order = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if not np.array_equal(np.sort(order), np.arange(num_samples)):
        raise ValueError(
            f"{name} must be a permutation of range({num_samples}), got an array of "
            f"shape {order.shape} and dtype {order.dtype}"
        )
    return order.astype(np.int64)


@dataclasses.dataclass(frozen=True)
class RoundRobinSharding:
    """Deals an order to replicas one group at a time, like playing cards.

    Replica r runs the groups at positions r, r + W, r + 2W ..., so that a step of B
    groups on each of W replicas completes the next W B groups of the order, whatever B
    and W are. Unless the order is one of groups, a group is a sample.

    The last round is filled up with the first groups, whose gradients are not balanced
    once more. If ``group_size`` does not divide ``num_samples``, the samples of the
    smaller group at the end are dealt one at a time, and are not balanced either.
    """

    num_samples: int
    num_replicas: int
    rank: int
    group_size: int = 1

    @property
    def num_groups(self) -> int:
        """The number of whole groups."""
        return self.num_samples // self.group_size

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
        whole, rest = np.split(order, [self.num_groups * self.group_size])
        groups = self._dealt(whole.reshape(-1, self.group_size), start)
        return np.concatenate([groups.reshape(-1), self._dealt(rest, 0)])

    def _dealt(self, units: np.ndarray, start: int) -> np.ndarray:
        """Returns this replica's units from position ``start``, and repetitions."""
        places = np.arange(start, len(units), self.num_replicas) + self.rank
        return units[places % max(len(units), 1)]
