"""Measures what weights in the balance do where the batch size changes.

Ridge regression with 480 samples is trained by `variable_batch_size` with an LR rule
that does not keep the weight of a sample in its update (root, constant), in the order
of `grab_xla`, which balances gradients with equal weights or with those of their
updates. The number is the squared distance to the minimum over the last ten epochs.

Takes three minutes; seconds with --quick:

    python tools/studies/weights_study.py --quick
    python tools/studies/weights_study.py --output docs/benchmarks/weights.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import grab_xla
import variable_batch_size as vbs
from tools.record import parser_with_output, save

NUM_SAMPLES, NUM_WEIGHTS, DECAY, LR, REFERENCE = 480, 20, 1e-2, 0.02, 16
# Batch sizes of many epochs, by a seed's generator.
TRACES: dict[str, Callable[[np.random.Generator], list[int]]] = {
    "another size at every step": lambda random: random.choice(
        [4, 8, 16, 32, 64], 4000
    ).tolist(),
    "another size every 40 steps": lambda random: np.repeat(
        random.choice([4, 8, 16, 32], 60), 40
    ).tolist(),
    "4, then 48 in every epoch": lambda random: [4] * 60 + [48] * 5,
}
ORDERS = {
    "rr": {"balance_type": "rr"},
    "mean": {"balance_type": "mean"},
    "mean, weighted": {"balance_type": "mean", "weights": "update"},
    "pair": {"balance_type": "pair"},
    "pair, weighted": {"balance_type": "pair", "weights": "update"},
}


def distance(trace: list[int], rule: str, order: str, epochs: int, seed: int) -> float:
    """Returns the mean squared distance to the minimum over the last ten epochs."""
    generator = torch.Generator().manual_seed(0)
    like = {"generator": generator, "dtype": torch.float64}
    inputs = torch.randn(NUM_SAMPLES, NUM_WEIGHTS, **like)
    targets = inputs @ torch.randn(NUM_WEIGHTS, **like)
    targets += torch.randn(NUM_SAMPLES, **like)
    identity = torch.eye(NUM_WEIGHTS, dtype=torch.float64)
    gram = inputs.T @ inputs / NUM_SAMPLES + DECAY * identity
    minimum = torch.linalg.solve(gram, inputs.T @ targets / NUM_SAMPLES)
    weight = torch.zeros_like(minimum, requires_grad=True)
    options = {"dtype": torch.float64, "device": "cpu", "seed": seed, **ORDERS[order]}
    grab = grab_xla.GraBSampler(range(NUM_SAMPLES), {"w": weight}, **options)
    sampler = vbs.CustomSampler(
        range(NUM_SAMPLES), trace, minibatch_size=4, on_end="cycle", order=grab,
        verbose=False,
    )  # fmt: skip
    optimizer = vbs.ElasticOptimizer(
        torch.optim.SGD([weight], LR), sampler, rule, REFERENCE
    )
    optimizer.attach(grab.after_update)
    distances = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for batch in sampler:
            residuals = inputs[batch] @ weight - targets[batch]
            loss = residuals.square().mean() + DECAY * weight.square().sum()
            (loss / 2).backward()
            gradients = residuals.detach().unsqueeze(1) * inputs[batch]
            grab.step({"w": gradients + DECAY * weight.detach()}, indices=batch)
            optimizer.step()
        distances.append(float((weight.detach() - minimum).square().sum()))
    return float(np.mean(distances[-10:]))


def main() -> None:
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    add("--epochs", type=int, default=40, help="default: 40")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    add("--rules", nargs="+", default=["root", "constant"], help="default: both")
    add("--quick", action="store_true", help="the last trace, constant, one seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = list(TRACES)
    if args.quick:
        names, args.rules, args.epochs, args.seeds = names[-1:], ["constant"], 15, [0]
    work = [(name, rule) for name in names for rule in args.rules]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, rule in tqdm(work, unit="row"):
        row = found.setdefault(name, {}).setdefault(rule, {})
        for order in ORDERS:
            distances = [
                distance(
                    TRACES[name](np.random.default_rng(seed)), rule, order,
                    args.epochs, seed,
                )
                for seed in args.seeds
            ]  # fmt: skip
            row[order] = float(np.exp(np.mean(np.log(distances))))
    print(f"| trace | rule | {' | '.join(ORDERS)} |")
    print("|---" * (2 + len(ORDERS)) + "|")
    for name, rule in work:
        numbers = [f"{value:.1e}" for value in found[name][rule].values()]
        print(f"| {name} | {rule} | {' | '.join(numbers)} |")
    settings = {name: getattr(args, name) for name in ("epochs", "seeds", "rules")}
    save(args.output, {"settings": settings, "distance": found})


if __name__ == "__main__":
    main()
