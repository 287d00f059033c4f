"""The next order from placements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grab_xla.balancing.reordering import (
    RoundRobinSharding,
    reorder,
    reorder_by_score,
    reorder_interleaved,
)

ORDER = np.array([10, 11, 12, 13, 14, 15, 16])


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ([1, 1, 1, 1, 1, 1, 1], [10, 11, 12, 13, 14, 15, 16]),
        ([-1] * 7, [16, 15, 14, 13, 12, 11, 10]),
        ([-1, 1, 1, -1, 1, -1, 1], [11, 12, 14, 16, 15, 13, 10]),
        ([-1, 1, 1, -1], [11, 12, 14, 15, 16, 13, 10]),  # Three were not seen.
        ([], [10, 11, 12, 13, 14, 15, 16]),
        (
            [-1, 0, 1, -1, 0, 1, 1],
            [12, 11, 15, 16, 14, 13, 10],
        ),  # Two keep their places.
        ([0] * 7, [10, 11, 12, 13, 14, 15, 16]),
    ],
)
def test_positives_then_negatives_reversed(placements, expected):
    assert reorder(ORDER, np.array(placements, dtype=np.int8)).tolist() == expected


def test_leaves_follow_one_another():
    placements = np.array([2, -1, 1, -2, 1, -1, 2])
    assert reorder(ORDER, placements, 2).tolist() == [12, 14, 15, 11, 10, 16, 13]


def test_unseen_samples_go_between_the_halves_of_the_tree():
    placements = np.array([2, -1, 1, -2])
    assert reorder(ORDER, placements, 2).tolist() == [12, 11, 14, 15, 16, 10, 13]


def test_workers_reorder_their_own_samples():
    order = np.array([0, 10, 1, 11, 2, 12, 3, 13, 4])
    placements = np.array([-1, 1, 1, -1, 1, 1, -1, -1])
    following = reorder_interleaved(order, placements, 2)
    assert following[0::2].tolist() == [1, 2, 4, 3, 0]
    assert following[1::2].tolist() == [10, 12, 13, 11]


def test_scores_sort_and_what_has_none_stays():
    scores = np.array([3.0, np.nan, 1.0, 2.0, 3.0])
    assert reorder_by_score(ORDER, scores, False).tolist() == [
        12, 11, 13, 10, 14, 15, 16,
    ]  # fmt: skip
    assert reorder_by_score(ORDER, scores, True).tolist() == [
        10, 11, 14, 13, 12, 15, 16,
    ]  # fmt: skip


@given(st.data())
def test_whatever_the_codes_it_is_a_permutation(data):
    n = data.draw(st.integers(0, 20))
    seen = data.draw(st.integers(0, n))
    leaves = data.draw(st.sampled_from([1, 2, 4]))
    placements = data.draw(
        st.lists(st.integers(-leaves, leaves), min_size=seen, max_size=seen)
    )
    order = np.array(data.draw(st.permutations(range(n))), dtype=np.int64)
    placements = np.array(placements, dtype=np.int64)
    assert sorted(reorder(order, placements, leaves)) == list(range(n))
    for workers in (1, 2, 3):
        assert sorted(reorder_interleaved(order, placements, workers)) == list(range(n))


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 30), st.booleans())
def test_replicas_are_dealt_equally_many_and_together_the_order(n, w, start, drop):
    start = min(start, n)
    order = np.random.default_rng(n).permutation(n)
    hands = [
        RoundRobinSharding(n, w, rank, drop).own(order, start) for rank in range(w)
    ]
    assert len({len(hand) for hand in hands}) == 1
    dealt = np.stack(hands, axis=1).reshape(-1)
    end = hands and RoundRobinSharding(n, w, 0, drop).end(start)
    assert dealt[: end - start].tolist() == order[start:end].tolist()
    if drop:
        assert n - end < w
    else:
        assert end == n
    assert set(dealt.tolist()) <= set(range(n))
