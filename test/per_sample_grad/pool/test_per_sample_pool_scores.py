"""Scores are returned as the highest, a frame, CSV and Parquet."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from support.per_sample_grad.pool import assert_same_bits

import per_sample_grad as psg


def drawn(count: int = 50) -> psg.PoolScores:
    """Returns floats of every size, some of which need all their digits."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 0x7F7FFFFF, count, dtype=np.int32)
    return psg.PoolScores(bits.view(np.float32), "loss")


def test_the_highest_come_first_and_ties_by_index():
    scores = psg.PoolScores(np.array([1, 3, 2, 3], dtype=np.float32), "loss")
    assert scores.top(3).tolist() == [1, 3, 2]
    assert scores.top(0).tolist() == []
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=f">= 0 and <= 4, got {wrong}"):
            scores.top(wrong)


def test_nan_has_no_rank():
    values = np.array([1, np.nan, -np.nan, 3, np.inf, np.nan], dtype=np.float32)
    bad = psg.PoolScores(values, "loss")
    for k in (0, 1, 6):
        with pytest.raises(
            ValueError,
            match=r"3 of 6 scores are NaN, .* \(samples 1, 2, 5\): .*skip_nan",
        ):
            bad.top(k)
    assert bad.top(3, skip_nan=True).tolist() == [4, 3, 0]
    with pytest.raises(ValueError, match=r"<= 3, got 4"):
        bad.top(4, skip_nan=True)
    with pytest.raises(TypeError, match="skip_nan must be True or False, got 'yes'"):
        bad.top(1, skip_nan="yes")
    many = psg.PoolScores(np.full(10, np.nan, dtype=np.float32), "loss")
    with pytest.raises(ValueError, match=r"\(samples 0, 1, 2, 3, 4, \.\.\.\)"):
        many.top(1)
    assert many.top(0, skip_nan=True).tolist() == []


def test_the_repr_is_one_short_line():
    values = np.arange(100_000, dtype=np.float32)
    values[7] = np.nan
    text = "PoolScores('loss' of 100000 samples, 0 to 1e+05, 1 NaN)"
    assert repr(psg.PoolScores(values, "loss")) == text
    assert repr(psg.PoolScores(values[:0], "loss")) == "PoolScores('loss' of 0 samples)"


def test_the_highest_are_those_of_a_sort():
    scores = drawn()
    order = sorted(range(len(scores)), key=lambda i: (-scores.scores[i], i))
    for k in (1, 17, len(scores)):
        assert scores.top(k).tolist() == order[:k]


@pytest.mark.parametrize("kind", ["frame", "csv"])
def test_every_bit_is_kept(kind, tmp_path):
    scores, path = drawn(), tmp_path / "scores"
    if kind == "frame":
        back = scores.to_frame()
    else:
        scores.to_csv(path)
        back = pd.read_csv(path, dtype={"score": np.float32})
    assert back.columns.tolist() == ["index", "score"]
    assert back["index"].tolist() == list(range(50))
    assert_same_bits(back["score"].to_numpy(), scores.scores)
