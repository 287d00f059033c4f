"""Pools and models to score.

The bits of `dense_model` depend on how many rows are multiplied; `make_model` has other
kinds of layers.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

CLASSES, WIDTH, BLOCK = 4, 67, 8
COUNT = 23  # samples of a small pool


class Vectors(Dataset):
    """A pool of vectors and classes, each drawn from its index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % CLASSES


def dense_model(seed: int = 0) -> nn.Module:
    """Returns a classifier of `Vectors`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(WIDTH, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, CLASSES)
        )


def assert_same_bits(found: np.ndarray, truth: np.ndarray) -> None:
    """Asserts that two float32 arrays have the same bits, NaN and -0.0 included."""
    assert found.dtype == truth.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.int32), truth.view(np.int32))


class Pool(Dataset):
    """A pool of sequences and classes, each drawn from its index.

    Attributes:
        asked: The indices that were asked for, in order.
    """

    def __init__(self, count: int = COUNT, fail_at: int | None = None) -> None:
        self.count, self.fail_at = count, fail_at
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.fail_at:
            raise OSError("the disk is gone")
        self.asked.append(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, 6, generator=generator), index % CLASSES


def make_model(seed: int = 0) -> nn.Module:
    """Returns a classifier of `Pool`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.5), nn.Linear(12, CLASSES),
        )  # fmt: skip


def by_hand(model: nn.Module, score: str, labels: str) -> np.ndarray:
    """Returns the scores of `Pool`, one sample after the other, in float64."""
    model = copy.deepcopy(model).double().eval()

    def grad_norm(x: torch.Tensor, target: torch.Tensor, params) -> torch.Tensor:
        loss = F.cross_entropy(model(x), target)
        grads = torch.autograd.grad(loss, list(params))
        return torch.cat([grad.flatten() for grad in grads]).norm()

    def one(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        if score == "loss":
            return F.cross_entropy(logits, target)
        if score == "el2n":
            return (logits.softmax(1)[0] - F.one_hot(target, CLASSES)[0]).norm()
        own = model[5] if score == "last_layer_grad_norm" else model
        return grad_norm(x, target, own.parameters())

    found = []
    for x, y in (Pool()[i] for i in range(COUNT)):
        x, target = x.double().unsqueeze(0), torch.tensor([y])
        chances = model(x).softmax(1)[0]
        if labels == "expected":
            classes = range(CLASSES)
            value = sum(chances[c] * one(x, torch.tensor([c])) for c in classes)
        else:
            pseudo = chances.argmax().unsqueeze(0)
            value = one(x, target if labels == "given" else pseudo)
        found.append(float(value.detach()))
    return np.array(found)
