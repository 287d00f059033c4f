"""Scoring a pool takes the memory of one part, and a search that of some blocks."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from support.per_sample_grad.pool import CLASSES, Pool, make_model
from torch import nn
from torch.utils.data import Dataset

import per_sample_grad as psg
import xla_replica
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


class Numbers(Dataset):
    """A pool of any size that takes no memory."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((8,), (index % 97) / 97.0), index % CLASSES


LARGE = 100_000


def of_numbers(folder: str | None, count: int) -> psg.PoolScores:
    """Scores a large pool."""
    with xla_replica.seeded(0):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    options = {"batch_size": 500, "folder": folder, "progress": False}
    return psg.score_pool(model, Numbers(count), **options)


def grown_by_a_large_pool(folder: str) -> int:
    """Returns the KiB that a large pool takes beyond a small one; checks its scores."""
    of_numbers(None, LARGE // 10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = of_numbers(folder, LARGE)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # The pool repeats itself, and so do its scores.
    assert len(found) == LARGE
    period = 97 * CLASSES
    np.testing.assert_allclose(
        found.scores[:-period], found.scores[period:], rtol=1e-5, atol=1e-7
    )
    return grown


@pytest.mark.slow
def test_a_hundred_thousand_take_no_more_memory_than_ten(tmp_path):
    """It runs in a new process, since the high-water mark is the process's."""
    code = "import sys, test_per_sample_pool_memory as t; "
    code += "print(t.grown_by_a_large_pool(sys.argv[1]))"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    # In KiB: 352 for the scores, and what a process drifts by.
    assert int(run.stdout.split()[-1]) < 4 * 1024


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
