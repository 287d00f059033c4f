"""Which labels of a training set are wrong? Self-influence, beside the plain loss.

    python examples/pool/mislabelled.py
    python examples/pool/mislabelled.py --seeds 10 --wrong 0.2

A sample with a wrong label has a large influence on its own loss: little else in the
training set explains it (TracIn: Pruthi et al. 2020, arXiv:2002.08484, section 4.1).
Self-influence is the squared norm of the gradient, or its square in the metric of a
damped Gauss-Newton matrix (LoGra: arXiv:2405.13954). Some labels are changed to another
class at random, a network is trained on all, and the table has the area under the curve
of finding the changed ones: 1 is perfect, 0.5 is chance.

What is known against it: the loss finds wrong labels too, for the price of a forward
pass (Pleiss et al. 2020, arXiv:2001.10528, compare such scores), and on these digits it
finds as many. A network that has memorised its labels would hide them from both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg
from examples.pool.digits import (
    CLASSES,
    count,
    digits,
    parser,
    preconditioned,
    rows_of,
    table,
    trained,
)


def area_under_curve(values: np.ndarray, wrong: np.ndarray) -> float:
    """Returns how probably a wrong label has a higher value than a right one."""
    ranks = values.argsort().argsort()
    pairs = wrong.sum() * (~wrong).sum()
    above = ranks[wrong].sum() - wrong.sum() * (wrong.sum() - 1) / 2
    return float(above / pairs)


def scores(train: TensorDataset, seed: int, steps: int) -> dict[str, np.ndarray]:
    """Returns how suspicious each way finds every sample, ``(n,)``."""
    (model,) = trained(torch.ones(1, len(train)), train, seed, steps)
    rows = rows_of(model, train)
    loss = psg.score_pool(model, train, score="loss", progress=False)
    return {
        "self-influence, preconditioned": (rows * preconditioned(rows, rows)).sum(1),
        "self-influence": (rows * rows).sum(1),
        "loss": loss.scores,
        "random": np.random.default_rng(seed).normal(size=len(train)),
    }


def measure(seed: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the areas after few and after many steps, by way."""
    (clean,) = digits(seed, options.train)
    pixels, labels = clean.tensors
    rng = np.random.default_rng(seed)
    wrong = np.zeros(len(labels), dtype=bool)
    wrong[rng.permutation(len(labels))[: round(options.wrong * len(labels))]] = True
    moved = torch.from_numpy(rng.integers(1, CLASSES, len(labels)))
    changed = torch.where(torch.from_numpy(wrong), (labels + moved) % CLASSES, labels)
    found: dict[str, list[float]] = {}
    for steps in options.steps:
        for name, values in scores(TensorDataset(pixels, changed), seed, steps).items():
            found.setdefault(name, []).append(area_under_curve(values, wrong))
    return found


def main() -> None:
    options_parser = parser(__doc__, 5, [("train", 800, "samples")])
    options_parser.add_argument(
        "--wrong", type=float, default=0.1, help="share of wrong labels"
    )
    text = "steps of training, a column for each number"
    options_parser.add_argument(
        "--steps", type=count, nargs="+", default=[50, 200, 1000], help=text
    )
    options = options_parser.parse_args()
    if not 0.5 < options.wrong * options.train < options.train - 0.5:
        options_parser.error(
            "--wrong must leave a wrong label and a right one: between 0 and 1, got "
            f"{options.wrong}"
        )
    found = [measure(seed, options) for seed in tqdm(range(options.seeds), unit="seed")]
    rows = {name: np.array([each[name] for each in found]) for name in found[0]}
    columns = [f"{steps} steps" for steps in options.steps]
    table("area under the curve", columns, rows)


if __name__ == "__main__":
    main()
