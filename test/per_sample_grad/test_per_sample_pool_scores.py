"""Scores are returned as the highest, a frame, CSV and Parquet."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest
from support.pool import assert_same_bits

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
    bad = psg.PoolScores(np.array([1, np.nan], dtype=np.float32), "loss")
    with pytest.raises(ValueError, match="that of sample 1"):
        bad.top(1)


def test_the_highest_are_those_of_a_sort():
    scores = drawn()
    order = sorted(range(len(scores)), key=lambda i: (-scores.scores[i], i))
    for k in (1, 17, len(scores)):
        assert scores.top(k).tolist() == order[:k]


def test_a_frame_has_indices_and_scores():
    frame = drawn().to_frame()
    assert frame["index"].tolist() == list(range(50))
    assert_same_bits(frame["score"].to_numpy(), drawn().scores)


def test_csv_keeps_every_bit(tmp_path):
    path = tmp_path / "scores.csv"
    drawn().to_csv(path)
    back = pd.read_csv(path, dtype={"score": np.float32})
    assert back.columns.tolist() == ["index", "score"]
    assert back["index"].tolist() == list(range(50))
    assert_same_bits(back["score"].to_numpy(), drawn().scores)


def test_parquet_keeps_every_bit(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "scores.parquet"
    drawn().to_parquet(path)
    back = pd.read_parquet(path)
    assert back.columns.tolist() == ["index", "score"]
    assert back["index"].tolist() == list(range(50))
    assert_same_bits(back["score"].to_numpy(), drawn().scores)


def test_parquet_without_an_engine_says_what_to_install(tmp_path, monkeypatch):
    for engine in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, engine, None)  # as if it were not installed
    with pytest.raises(ImportError, match="pip install pyarrow, or use to_csv"):
        drawn().to_parquet(tmp_path / "scores.parquet")
    assert not list(tmp_path.iterdir())
