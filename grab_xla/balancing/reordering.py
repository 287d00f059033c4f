"""The next epoch's order as a pure function of this epoch's order and its codes.

A balancer gives every visited sample one integer, its code: where the sample goes.

- ``+(leaf + 1)``: to the front of a leaf, behind those that came before it;
- ``-(leaf + 1)``: to the back of a leaf, in front of those that came before it;
- ``0``: nowhere. The gradient was not finite; the sample keeps its place.

Balancers without a tree have one leaf, so that their codes are the signs of the papers
(Lu, Guo and De Sa, arXiv:2205.10733): the next order is the positives as they came,
then the negatives reversed. Samples that no step saw go to the middle, where the two
meet: at either end they could be the ones that are cut off in every epoch.
"""

from __future__ import annotations

import numpy as np

KEEP = 0


def reorder(order: np.ndarray, codes: np.ndarray, num_leaves: int = 1) -> np.ndarray:
    """The next order.

    Args:
        order: ``(n,)`` int64, this epoch's permutation.
        codes: ``(m,)`` integers, ``m <= n``: of the first m samples of ``order``.
        num_leaves: Leaves that codes may name; unseen samples go behind the first
            half of the leaves, or between the two signs of a single leaf.

    Returns:
        ``(n,)`` int64, a permutation of the same samples.

    >>> reorder(np.array([4, 0, 3, 1, 2]), np.array([1, -1, 1, -1]))
    array([4, 3, 2, 1, 0])
    """
    num_seen = len(codes)
    visited, unseen = order[:num_seen], order[num_seen:]
    moves = np.flatnonzero(codes != KEEP)
    code = codes[moves].astype(np.int64)
    leaf, negative = np.abs(code) - 1, code < 0
    arrival = np.where(negative, -moves, moves)
    by_place = np.lexsort((arrival, negative, leaf))
    placed = visited[moves[by_place]]
    in_front = leaf < num_leaves // 2 if num_leaves > 1 else ~negative
    middle = int(np.count_nonzero(in_front))
    following = np.empty_like(order)
    free = np.ones(len(order), dtype=bool)
    free[:num_seen] = codes != KEEP
    following[~free] = order[~free]
    following[free] = np.concatenate([placed[:middle], unseen, placed[middle:]])
    return following


def reorder_interleaved(
    order: np.ndarray, codes: np.ndarray, num_workers: int
) -> np.ndarray:
    """The next order where worker w owns ``order[w::num_workers]``; see `reorder`.

    Each worker's samples are reordered among themselves, as coordinated balancing
    (CD-GraB; Cooper et al., arXiv:2302.00845) does.
    """
    following = np.empty_like(order)
    for worker in range(num_workers):
        own = slice(worker, None, num_workers)
        following[own] = reorder(order[own], codes[own])
    return following


def reorder_by_score(
    order: np.ndarray, scores: np.ndarray, descending: bool
) -> np.ndarray:
    """Samples sorted by score, ties as they were.

    Args:
        order: ``(n,)`` int64, this epoch's permutation.
        scores: ``(m,)`` floats of its first m samples. A sample whose score is not
            finite, or that has none, keeps its place.
        descending: Largest first.
    """
    known = np.zeros(len(order), dtype=bool)
    known[: len(scores)] = np.isfinite(scores)
    values = scores[known[: len(scores)]]
    by_score = np.argsort(-values if descending else values, kind="stable")
    following = order.copy()
    following[known] = order[known][by_score]
    return following
