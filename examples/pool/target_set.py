"""Which samples of a pool help with a few examples of another task?

    python examples/pool/target_set.py
    python examples/pool/target_set.py --seeds 10 --budget 50

LESS (Xia et al. 2024, arXiv:2402.04333) trains on a little of the pool, projects the
gradients of the pool and of a few examples of the target task, and takes the samples
with the largest cosine to any of these, as its gradients say how losses fall together.
Here one digit in five of the pool is turned over (its rows and columns are exchanged),
and so are all of the target's. The table has the accuracy on unseen turned digits of
networks that are trained on what each way takes, the same number of samples, and the
share of turned digits among them.

What is known against it: with larger pools and budgets many of these methods do worse
than random samples, and the cosine of hidden features, which costs a forward pass, does
better (Ivison et al. 2025, arXiv:2503.01807). It is a row of the table. LESS scales
gradients as Adam does and adds several checkpoints; this is one checkpoint and SGD.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

from examples.pool.digits import (
    chosen,
    digits,
    logits_of,
    parser,
    rows_of,
    table,
    trained,
)


def turned(data: TensorDataset, which: torch.Tensor | None = None) -> TensorDataset:
    """Returns digits of which those, or all, have rows and columns exchanged."""
    pixels, labels = data.tensors
    other = pixels.view(-1, 8, 8).transpose(1, 2).flatten(1)
    if which is not None:
        other = torch.where(which.unsqueeze(1), other, pixels)
    return TensorDataset(other, labels)


def taken(
    model: nn.Module, pool: TensorDataset, target: TensorDataset, budget: int, seed: int
) -> dict[str, np.ndarray]:
    """Returns which samples of the pool each way takes, ``(budget,)``."""
    rows, wanted = (
        each / np.linalg.norm(each, axis=1, keepdims=True)
        for each in (rows_of(model, pool), rows_of(model, target))
    )
    gradients = wanted @ rows.T
    with torch.no_grad():
        own, others = (
            nn.functional.normalize(model[:2].cpu()(data.tensors[0]))
            for data in (pool, target)
        )
    features = (others @ own.T).numpy()
    return {
        "gradients' cosine (LESS)": np.argsort(-gradients.max(0))[:budget],
        "features' cosine": np.argsort(-features.max(0))[:budget],
        "random": np.random.default_rng(seed).permutation(len(pool))[:budget],
    }


def measure(seed: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns accuracy on the target and the share of turned digits, by way."""
    pool, target, test = digits(seed, options.pool, options.target, 500)
    generator = torch.Generator().manual_seed(seed)
    which = torch.rand(len(pool), generator=generator) < 0.2
    pool, target, test = turned(pool, which), turned(target), turned(test)
    warm_up = np.random.default_rng(seed + 1).permutation(len(pool))[: len(pool) // 20]
    (model,) = trained(chosen(len(pool), warm_up), pool, seed)
    rows = taken(model, pool, target, options.budget, seed)
    models = trained(chosen(len(pool), *rows.values()), pool, seed)
    pixels, labels = test.tensors
    right = (logits_of(models, pixels).argmax(2) == labels).float().mean(1)
    return {
        name: [float(accuracy), float(which[row].float().mean())]
        for (name, row), accuracy in zip(rows.items(), right)
    }


def main() -> None:
    counts = [
        ("pool", 1000, "samples of the pool"),
        ("target", 20, "examples of the target task"),
        ("budget", 100, "samples to take"),
    ]
    options_parser = parser(__doc__, 5, counts)
    options = options_parser.parse_args()
    if options.pool < max(20, options.budget):
        options_parser.error("--pool must be at least 20, and at least --budget")
    found = [measure(seed, options) for seed in tqdm(range(options.seeds), unit="seed")]
    rows = {name: np.array([each[name] for each in found]) for name in found[0]}
    table("mean ± standard error over seeds", ["accuracy", "share turned"], rows)


if __name__ == "__main__":
    main()
