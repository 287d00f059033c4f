"""Pools and models to score.

The bits of `dense_model` depend on how many rows are multiplied; `make_model` has other
kinds of layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import per_sample_grad as psg
from support.per_sample_grad.gradient_oracle import norms_of

CLASSES, WIDTH, BLOCK = 4, 67, 8
COUNT = 23  # samples of a small pool


class Pool(Dataset):
    """A pool of sequences and classes, each drawn from its index, and changed.

    Attributes:
        asked: The indices that were asked for, in order; ``watch`` is told of each.
    """

    shape: tuple[int, ...] = (2, 6)

    def __init__(
        self, count: int = COUNT, change: Callable = Tensor.clone, watch: Callable = id
    ) -> None:
        self.count, self.change, self._watch = count, change, watch
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self._watch(index)
        self.asked.append(index)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(self.shape, generator=generator)
        return self.change(x), index % CLASSES


class Vectors(Pool):
    """A pool of vectors and classes."""

    shape = (WIDTH,)


def dense_model(seed: int = 0) -> nn.Module:
    """Returns a classifier of `Vectors`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, last = nn.Linear(WIDTH, 33), nn.Linear(33, CLASSES)
    return nn.Sequential(first, nn.LayerNorm(33), nn.Tanh(), last)


def scores(model: Any = None, pool: Any = None, **options: Any) -> np.ndarray:
    """Returns the scores of a pool; by default of `Pool`, by `make_model`."""
    model = make_model() if model is None else model
    pool = Pool() if pool is None else pool
    options = {"block_size": 4, "progress": False, **options}
    return psg.score_pool(model, pool, **options).scores


def assert_same_bits(found: np.ndarray, truth: np.ndarray) -> None:
    """Asserts that two float32 arrays have the same bits, NaN and -0.0 included."""
    assert found.dtype == truth.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.int32), truth.view(np.int32))


def make_model(seed: int = 0) -> nn.Module:
    """Returns a classifier of `Pool`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.5), nn.Linear(12, CLASSES),
        )  # fmt: skip


def by_hand(model: nn.Module, score: str, labels: str) -> np.ndarray:
    """Returns the scores of `Pool` in float64, gradients one sample after the other."""
    model = copy.deepcopy(model).double().eval()
    x, y = default_collate([Pool()[i] for i in range(COUNT)])
    logits = model(x.double())
    chances = logits.softmax(1)

    def scores(targets: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(logits, targets, reduction="none")
        if score == "loss":
            return losses
        if score == "el2n":
            return (chances - F.one_hot(targets, CLASSES)).norm(dim=1)
        own = model[5] if score == "last_layer_grad_norm" else model
        return norms_of(losses, own.parameters())

    if labels == "expected":
        of_classes = [scores(torch.full_like(y, number)) for number in range(CLASSES)]
        found = (chances * torch.stack(of_classes, 1)).sum(1)
    else:
        found = scores(y if labels == "given" else chances.argmax(1))
    return found.detach().numpy()
