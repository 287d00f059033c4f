"""RigL finds connections that a fixed topology does not have, on real digits."""

from __future__ import annotations

import statistics

import handwritten_digits
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rigl_xla import RigLScheduler

STEPS = 1500


def accuracy(method: str, sparsity: float, seed: int) -> float:
    """Percent of the test digits, of an MLP 64-300-100-10 with ERK sparsities."""
    pytest.importorskip("sklearn")
    digits = handwritten_digits.load("digits", "")
    inputs = digits.train_images.flatten(1).float() / 255
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(64, 300),
            nn.ReLU(),
            nn.Linear(300, 100),
            nn.ReLU(),
            nn.Linear(100, 10),
        )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    pruner = RigLScheduler(
        model,
        optimizer,
        dense_allocation=1 - sparsity,
        T_end=STEPS * 3 // 4,
        sparsity_distribution="erk",
        ignore_linear_layers=False,
        delta=50,
        method=method,
        seed=seed,
    )
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (64,), generator=draw)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[chosen]), digits.train_labels[chosen])
        loss.backward()
        if pruner():
            optimizer.step()
    with torch.no_grad():
        found = model(digits.test_images.flatten(1).float() / 255).argmax(1)
    return 100 * (found == digits.test_labels).double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(("sparsity", "points"), [(0.98, 4), (0.99, 30)])
def test_rigl_beats_a_static_topology(sparsity, points):
    mean = {
        method: statistics.mean(accuracy(method, sparsity, seed) for seed in range(5))
        for method in ("static", "rigl")
    }
    assert mean["rigl"] >= mean["static"] + points, mean
