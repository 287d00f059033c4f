"""Pools to score, and a model whose bits depend on how many rows are multiplied."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

CLASSES, WIDTH, BLOCK = 4, 67, 8


class Vectors(Dataset):
    """Pairs drawn from their index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % CLASSES


def dense_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(WIDTH, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, CLASSES)
        )


def assert_same_bits(found: np.ndarray, truth: np.ndarray) -> None:
    assert found.dtype == truth.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.int32), truth.view(np.int32))
