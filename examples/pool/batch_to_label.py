"""Which samples of a pool should be labelled next? A diverse batch of large gradients.

    python examples/pool/batch_to_label.py
    python examples/pool/batch_to_label.py --seeds 10 --batch 10

BADGE (Ash et al. 2020, arXiv:1906.03671) takes the gradients that the last layer would
have if the model's own predictions were right, and draws a batch from them as k-means++
draws its first centres: with a probability in proportion to the squared distance to
what is chosen already. So it is made of samples that are uncertain (long gradients) and
unlike each other. The table has the accuracy after each batch; all ways begin with the
same labels.

What is known against it: gains over random samples vary with the setting, and shrink or
vanish when the models are well regularised (Munjal et al. 2020, arXiv:2002.09564). The
longest gradients alone, without diversity, are a row of the table too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from torch import nn
from torch.utils.data import Subset
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg
from examples.pool.digits import (
    chosen,
    digits,
    logits_of,
    parser,
    rows_of,
    table,
    trained,
)

LAST_LAYER = "2."


def spread_out(rows: np.ndarray, count: int, rng: np.random.Generator) -> list[int]:
    """Returns ``count`` rows as k-means++ draws centres, the longest one first."""
    found = [int((rows**2).sum(1).argmax())]
    distances = ((rows - rows[found[0]]) ** 2).sum(1)
    for _ in range(count - 1):
        found.append(int(rng.choice(len(rows), p=distances / distances.sum())))
        distances = np.minimum(distances, ((rows - rows[found[-1]]) ** 2).sum(1))
    return found


def badge(model: nn.Module, pool: Subset, count: int, seed: int) -> list[int]:
    rows = rows_of(model, pool, size=512, layer=LAST_LAYER, labels="pseudo")
    return spread_out(rows.astype(float), count, np.random.default_rng(seed))


def longest(model: nn.Module, pool: Subset, count: int, seed: int) -> list[int]:
    params = [n for n, _ in model.named_parameters() if n.startswith(LAST_LAYER)]
    options = {"labels": "pseudo", "params": params, "progress": False}
    return psg.score_pool(model, pool, **options).top(count).tolist()


def at_random(model: nn.Module, pool: Subset, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(len(pool))[:count].tolist()


WAYS = {"BADGE": badge, "longest gradients": longest, "random": at_random}


def measure(seed: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the accuracies on the test set after each batch, by way."""
    pool, test = digits(seed, options.pool, 500)
    first = np.random.default_rng(seed).permutation(len(pool))[: options.batch].tolist()
    labelled = {name: [*first] for name in WAYS}
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for round_ in range(options.rounds + 1):
        models = trained(chosen(len(pool), *labelled.values()), pool, seed)
        pixels, labels = test.tensors
        right = (logits_of(models, pixels).argmax(2) == labels).float().mean(1)
        for (name, way), model, accuracy in zip(WAYS.items(), models, right):
            found[name].append(float(accuracy))
            if round_ == options.rounds:
                continue
            rest = sorted({*range(len(pool))} - {*labelled[name]})
            more = way(model, Subset(pool, rest), options.batch, 100 * seed + round_)
            labelled[name] += [rest[place] for place in more]
    return found


def main() -> None:
    counts = [
        ("pool", 1000, "samples of the pool"),
        ("batch", 20, "samples that are labelled in each round"),
        ("rounds", 4, "rounds"),
    ]
    options_parser = parser(__doc__, 5, counts)
    options = options_parser.parse_args()
    if options.batch * (options.rounds + 1) > options.pool:
        options_parser.error("--batch, times --rounds and one more, exceeds --pool")
    found = [measure(seed, options) for seed in tqdm(range(options.seeds), unit="seed")]
    rows = {name: np.array([each[name] for each in found]) for name in found[0]}
    sizes = [options.batch * (n + 1) for n in range(options.rounds + 1)]
    table("accuracy after", [f"{size} labels" for size in sizes], rows)


if __name__ == "__main__":
    main()
