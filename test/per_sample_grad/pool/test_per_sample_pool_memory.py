"""Scoring a pool takes the memory of one part, and a search that of some blocks."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from support.per_sample_grad.pool import Pool, make_model

import per_sample_grad as psg
from per_sample_grad.pool import gradient_index
from per_sample_grad.pool.gradient_index import GradientIndex


class Counting(Pool):
    """A pool that counts the live tensors whenever a part begins."""

    def __init__(self, count: int, part_size: int) -> None:
        super().__init__(count)
        self.part_size = part_size
        self.alive: list[int] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index % self.part_size == 0:
            gc.collect()
            kinds = Counter(map(type, gc.get_objects()))
            tensors = (n for kind, n in kinds.items() if issubclass(kind, torch.Tensor))
            self.alive.append(sum(tensors))
        return super().__getitem__(index)


@pytest.fixture
def frozen():
    """Leaves what is alive now out of what is counted, which takes long otherwise."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    "score",
    ["el2n", *(pytest.param(s, marks=pytest.mark.slow) for s in ("grad_norm", "egl"))],
)
def test_no_tensor_outlives_its_part(score, tmp_path, frozen):
    options = {"score": score, "block_size": 8, "part_size": 32, "progress": False}
    pool = Counting(10 * 32, 32)
    psg.score_pool(make_model(), pool, folder=tmp_path, **options)
    counts = pool.alive[-8:]  # without the first parts' and the description's
    assert len(set(counts)) == 1, counts


def test_a_search_takes_the_memory_of_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_index, "_BLOCK_BYTES", 2**16)
    count, size, num_queries = 4000, 256, 50
    rows = np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    mapped, queries = np.load(tmp_path / "rows.npy", mmap_mode="r"), rows[:num_queries]

    def part(number: int) -> np.ndarray:
        return mapped[number * 1000 : (number + 1) * 1000]

    index = GradientIndex({"seed": 0, "kept.w": [1, size]}, 1000, part, count)
    found = {}
    for by in gradient_index.MEASURES:
        tracemalloc.start()
        found[by] = index.search(queries, top=5, by=by).indices[:, 0]
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # The queries twice (as they are, divided by their norms), and some blocks.
        assert most < 2 * queries.nbytes + 8 * 2**16, most
        assert most < rows.nbytes / 6
    np.testing.assert_array_equal(found["cosine"], np.arange(num_queries))
