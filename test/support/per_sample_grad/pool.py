"""Pools to score, and their models."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import per_sample_grad as psg
import xla_replica

BLOCK = 8


class Pool(Dataset):
    """A pool of sequences and classes, each drawn from its index, and changed.

    ``asked`` are the indices that were asked for; ``watch`` is told of each.
    """

    size, classes, shape = 23, 4, (2, 6)

    def __init__(self, count: int = size, change=Tensor.clone, watch=id) -> None:
        self.count, self.change, self._watch = count, change, watch
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self._watch(index)
        self.asked.append(index)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(self.shape, generator=generator)
        return self.change(x), index % self.classes

    @classmethod
    def model(cls, seed: int = 0) -> nn.Module:
        """Returns a classifier, with several kinds of layers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(
                nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(),
                nn.Dropout(0.5), nn.Linear(12, cls.classes),
            )  # fmt: skip

    @classmethod
    def on_device(cls, seed: int = 0) -> nn.Module:
        """Returns it on this replica's device; emulated ones share a generator."""
        replica = xla_replica.current()
        with replica.seeded(0):
            return cls.model(seed).to(replica.device)


class Vectors(Pool):
    """A pool whose classifier's bits depend on how many rows are multiplied."""

    shape = (67,)

    @classmethod
    def model(cls, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first, last = nn.Linear(*cls.shape, 33), nn.Linear(33, cls.classes)
        return nn.Sequential(first, nn.LayerNorm(33), nn.Tanh(), last)


def scores(model: Any = None, pool: Any = None, **options: Any) -> np.ndarray:
    """Returns scores; by default those of `Pool`, by its model.

    A size in place of a score stands for the rows of a projection.
    """
    model = Pool.model() if model is None else model
    pool = Pool() if pool is None else pool
    options = {"block_size": 4, "progress": False, **options}
    if isinstance(size := options.get("score"), int):
        options["score"] = psg.Projection(dict(model.named_parameters()), size)
    return psg.score_pool(model, pool, **options).scores


def assert_same_bits(found: np.ndarray, truth: np.ndarray) -> None:
    """Asserts that two float32 arrays have the same bits, NaN and -0.0 included."""
    assert found.dtype == truth.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.int32), truth.view(np.int32))
