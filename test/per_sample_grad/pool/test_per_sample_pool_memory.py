"""Scoring a pool takes the memory of one part."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from support.per_sample_grad.pool import Pool, scores


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
    pool = Counting(10 * 32, 32)
    scores(pool=pool, score=score, block_size=8, part_size=32, folder=tmp_path)
    counts = pool.alive[-8:]  # without the first parts' and the description's
    assert len(set(counts)) == 1, counts
