"""Which training samples are responsible for what a network says about a query?

    python examples/pool/influence.py
    python examples/pool/influence.py --seeds 5 --remove 20

Gradients answer to first order: a sample whose gradient has a large inner product with
the query's, in the metric of a damped Gauss-Newton matrix, lowers the query's loss when
it is trained on (influence functions: Koh and Liang 2017, arXiv:1703.04730; of
projections: LoGra, Choe et al. 2024, arXiv:2405.13954). Two tests with training again:

- The linear datamodeling score (Park et al. 2023, arXiv:2303.14186): over random halves
  of the training set, the rank correlation of the sum of a half's influences with the
  (negative) loss of the query after training on it.
- Removal: how much the query's loss grows when the samples that are named most are left
  out, and what is left is trained on.

Beside them are baselines that know no gradient. What is known against it: influence
estimates of deep networks vary with depth, width and weight decay (Basu et al. 2021,
arXiv:2006.14651), and they answer another question than leaving a sample out (Bae et
al. 2022, arXiv:2209.05364). Here all trainings of a seed share their first weights,
which flatters every estimate. Similarity of features among samples of the query's class
often comes close: look at the table before you pay for gradients.
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
    losses_of,
    parser,
    preconditioned,
    rows_of,
    table,
    trained,
)


def influences(
    model: nn.Module, train: TensorDataset, queries: TensorDataset, seed: int
) -> dict[str, np.ndarray]:
    """Returns how much each way says that samples lower queries' losses, ``(Q, n)``."""
    rows, asked = rows_of(model, train), rows_of(model, queries)
    products = asked @ rows.T
    with torch.no_grad():
        features, others = (
            nn.functional.normalize(model[:2].cpu()(data.tensors[0]))
            for data in (train, queries)
        )
    similar = (others @ features.T).numpy()
    same = (queries.tensors[1].unsqueeze(1) == train.tensors[1]).numpy()
    return {
        "gradients, preconditioned": preconditioned(asked, rows) @ rows.T,
        "gradients, inner product": products,
        "gradients, cosine": products / np.linalg.norm(rows, axis=1),
        "similar features of its class": np.where(same, similar + 1, 0),
        "similar features": similar,
        "random": np.random.default_rng(seed).normal(size=similar.shape),
    }


def ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort(axis=0).argsort(axis=0).astype(float)


def measure(seed: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns for each way the datamodeling score and the growth of the loss."""
    train, queries = digits(seed, options.train, options.queries)
    count, rng = len(train), np.random.default_rng(seed)
    full = trained(torch.ones(1, count), train, seed)
    found = influences(full[0], train, queries, seed)
    halves = [rng.permutation(count)[: count // 2] for _ in range(options.halves)]
    members = chosen(count, *halves)
    after = losses_of(trained(members, train, seed), queries).numpy()
    before = losses_of(full, queries).numpy()[0]
    rows = {}
    for name, values in found.items():
        sums = ranks(members.numpy() @ values.T)
        pairs = zip(sums.T, ranks(-after).T)
        score = np.mean([np.corrcoef(a, b)[0, 1] for a, b in pairs])
        named = np.argsort(-values, axis=1)[:, : options.remove]
        models = trained(1 - chosen(count, *named), train, seed)
        growth = losses_of(models, queries).diagonal().numpy() - before
        rows[name] = [float(score), float(growth.mean())]
    return rows


def main() -> None:
    counts = [
        ("train", 400, "training samples"),
        ("queries", 20, "queries, from the rest"),
        ("halves", 60, "random halves to train on"),
        ("remove", 10, "samples that are left out for each query"),
    ]
    options_parser = parser(__doc__, 3, counts)
    options = options_parser.parse_args()
    if options.remove >= options.train or options.halves < 2:
        options_parser.error("--remove must be less than --train, --halves at least 2")
    found = [measure(seed, options) for seed in tqdm(range(options.seeds), unit="seed")]
    columns = ["datamodeling", f"{options.remove} removed: loss"]
    rows = {name: np.array([each[name] for each in found]) for name in found[0]}
    table("mean ± standard error over seeds", columns, rows)


if __name__ == "__main__":
    main()
