"""The next order from placements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grab_xla.balancing.reordering import RoundRobinSharding, reorder, reorder_by_score

ORDER = np.array([10, 11, 12, 13, 14, 15, 16])


@pytest.mark.parametrize(
    ("placements", "num_leaves", "expected"),
    [
        ([1, 1, 1, 1, 1, 1, 1], 1, [10, 11, 12, 13, 14, 15, 16]),
        ([-1] * 7, 1, [16, 15, 14, 13, 12, 11, 10]),
        ([-1, 1, 1, -1, 1, -1, 1], 1, [11, 12, 14, 16, 15, 13, 10]),
        ([-1, 1, 1, -1], 1, [11, 12, 14, 15, 16, 13, 10]),  # three were not seen
        ([], 1, [10, 11, 12, 13, 14, 15, 16]),
        # Two keep their places.
        ([-1, 0, 1, -1, 0, 1, 1], 1, [12, 11, 15, 16, 14, 13, 10]),
        ([0] * 7, 1, [10, 11, 12, 13, 14, 15, 16]),
        ([2, -1, 1, -2, 1, -1, 2], 2, [12, 14, 15, 11, 10, 16, 13]),
        # Unseen samples go between the halves of the tree.
        ([2, -1, 1, -2], 2, [12, 11, 14, 15, 16, 10, 13]),
    ],
)
def test_leaves_have_positives_then_negatives_reversed(
    placements, num_leaves, expected
):
    given = np.array(placements, dtype=np.int8)
    assert reorder(ORDER, given, num_leaves).tolist() == expected


def test_scores_sort_and_what_has_none_stays():
    scores = np.array([3.0, np.nan, 1.0, 2.0, 3.0])
    ascending = reorder_by_score(ORDER, scores, False).tolist()
    assert ascending == [12, 11, 13, 10, 14, 15, 16]
    descending = reorder_by_score(ORDER, scores, True).tolist()
    assert descending == [10, 11, 14, 13, 12, 15, 16]


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 30), st.booleans())
def test_replicas_are_dealt_equally_many_and_together_the_order(n, w, start, drop):
    start = min(start, n)
    order = np.random.default_rng(n).permutation(n)
    hands = [
        RoundRobinSharding(n, w, rank, drop).own(order, start) for rank in range(w)
    ]
    assert len({len(hand) for hand in hands}) == 1
    dealt = np.stack(hands, axis=1).reshape(-1)
    end = RoundRobinSharding(n, w, 0, drop).end(start)
    assert dealt[: end - start].tolist() == order[start:end].tolist()
    assert n - end < w if drop else end == n
    assert set(dealt.tolist()) <= set(range(n))
