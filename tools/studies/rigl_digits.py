"""Measures what moving connections gains: RigL, SET and a fixed topology on digits.

An MLP 64-300-100-10 with ERK sparsities is trained on the 1797 digits that come with
scikit-learn, 1500 steps of 64 samples, from five seeds. All methods of a seed begin
with the same weights and the same connections, and see the same samples; 'dense' is the
same network without a mask. Accuracy is measured on 360 digits that are not trained on.

Takes about five minutes; half a minute with --quick:

    python tools/studies/rigl_digits.py --quick
    python tools/studies/rigl_digits.py --image docs/images/rigl_digits.png \\
        --output docs/benchmarks/rigl_digits.json
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

from rigl_xla import RigLScheduler
from tools.record import parser_with_output, picture, save

METHODS = ("dense", "static", "set", "rigl")
STEPS, BATCH_SIZE, DELTA = 1500, 64, 50
# Accuracies in per cent, by sparsity and method: (seeds, evaluations).
Measured = dict[float, dict[str, np.ndarray]]


class Digits(NamedTuple):
    """Pixels ``(N, 64)`` float32 in [0, 1] and labels ``(N,)`` int64, split in two."""

    train_pixels: torch.Tensor
    train_labels: torch.Tensor
    test_pixels: torch.Tensor
    test_labels: torch.Tensor


@functools.cache
def digits() -> Digits:
    """Returns 1437 and 360 of scikit-learn's digits, stratified by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    train, test = train_test_split(
        range(len(labels)), test_size=360, random_state=0, stratify=labels
    )
    pixels = torch.from_numpy(pixels / 16).float()
    labels = torch.from_numpy(labels).to(torch.int64)
    return Digits(pixels[train], labels[train], pixels[test], labels[test])


def accuracies(
    method: str,
    sparsity: float,
    seed: int,
    steps: int = STEPS,
    every: int | None = None,
) -> list[float]:
    """Trains once; returns test accuracies in per cent, after every ``every`` steps.

    Args:
        method: One of `METHODS`.
        sparsity: Share of inactive weights, of all three layers together.
        seed: The seed of weights, connections and samples.
        steps: The length of the run; the topology is fixed after three quarters of it.
        every: Steps from one evaluation to the next; default: one, at the end.
    """
    data, draw = digits(), torch.Generator().manual_seed(seed)
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
    pruner = None
    if method != "dense":
        pruner = RigLScheduler(
            model,
            optimizer,
            dense_allocation=1 - sparsity,
            T_end=steps * 3 // 4,
            sparsity_distribution="erk",
            ignore_linear_layers=False,
            delta=DELTA,
            method=method,
            seed=seed,
        )
    found = []
    for step in range(1, steps + 1):
        chosen = torch.randint(len(data.train_labels), (BATCH_SIZE,), generator=draw)
        optimizer.zero_grad()
        logits = model(data.train_pixels[chosen])
        F.cross_entropy(logits, data.train_labels[chosen]).backward()
        if pruner is None or pruner():
            optimizer.step()
        if step % (every or steps) == 0:
            with torch.no_grad():
                guesses = model(data.test_pixels).argmax(1)
            right = (guesses == data.test_labels).double().mean()
            found.append(100 * right.item())
    return found


def measure(args: argparse.Namespace) -> Measured:
    """Trains with all sparsities, methods and seeds, and 'dense' once for each seed."""
    measured: Measured = {sparsity: {} for sparsity in args.sparsities}
    run = functools.cache(accuracies)
    work = [(s, m) for s in args.sparsities for m in args.methods]
    with tqdm(total=len(work) * len(args.seeds), unit="run") as bar:
        for sparsity, method in work:
            curves = []
            for seed in args.seeds:
                bar.set_description(f"{method}, {sparsity:.0%} sparse, seed {seed}")
                asked = 0.0 if method == "dense" else sparsity
                curves.append(run(method, asked, seed, args.steps, args.every))
                bar.update()
            measured[sparsity][method] = np.array(curves)
    return measured


def margin(measured: dict[str, np.ndarray]) -> float:
    """Returns the mean of the points by which RigL ends above a fixed topology."""
    return float((measured["rigl"][:, -1] - measured["static"][:, -1]).mean())


def print_table(measured: Measured) -> None:
    for sparsity, by_method in measured.items():
        print(f"{sparsity:.0%} sparse: accuracy at the end, in per cent")
        for method, curves in by_method.items():
            last = curves[:, -1]
            seeds = " ".join(f"{value:6.2f}" for value in last)
            print(f"  {method:>8} {last.mean():6.2f}   seeds: {seeds}")
        if {"rigl", "static"} <= by_method.keys():
            print(f"  RigL is {margin(by_method):.2f} points above the fixed topology")


def plot(measured: Measured, every: int, path: Path) -> None:
    """Draws accuracy against steps; bands span the seeds."""
    size = (5 * len(measured), 4.8)
    with picture(path, len(measured), figsize=size, sharey=True) as axes:
        for axis, (sparsity, by_method) in zip(axes, measured.items()):
            for method, curves in by_method.items():
                steps = every * np.arange(1, curves.shape[1] + 1)
                label = f"{method} ({curves[:, -1].mean():.1f} %)"
                axis.plot(steps, curves.mean(0), linewidth=1.4, label=label)
                axis.fill_between(steps, curves.min(0), curves.max(0), alpha=0.2)
            axis.axvline(0.75 * steps[-1], color="gray", linewidth=0.8, linestyle=":")
            axis.set_title(f"{sparsity:.0%} sparse")
            axis.set_xlabel("steps (dotted: the topology is fixed from here)")
            axis.grid(alpha=0.3)
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        axes[0].set_ylabel("test accuracy (%)")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    add("--sparsities", type=float, nargs="+", default=[0.98, 0.99],
        help="default: 0.98 0.99")  # fmt: skip
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS),
        help=f"default: {' '.join(METHODS)}")  # fmt: skip
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4],
        help="default: 0 1 2 3 4")  # fmt: skip
    add("--steps", type=int, default=STEPS, help=f"of a run (default: {STEPS})")
    add("--every", type=int, default=25,
        help="steps from one evaluation to the next (default: 25)")  # fmt: skip
    add("--quick", action="store_true",
        help="two seeds, a fixed topology and RigL")  # fmt: skip
    add("--image", type=Path, help="PNG to draw")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.methods = args.seeds[:2], ["static", "rigl"]
    if args.every < 1 or args.steps % args.every:
        parser.error(
            f"--steps {args.steps} must be a multiple of --every, which is {args.every}"
        )
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)  # the matrices are small: several threads only wait
    measured = measure(args)
    print_table(measured)
    if args.image:
        plot(measured, args.every, args.image)
    if args.output:
        result = {
            "settings": {
                "network": [64, 300, 100, 10],
                "sparsity_distribution": "erk",
                "steps": args.steps,
                "batch_size": BATCH_SIZE,
                "delta": DELTA,
                "seeds": args.seeds,
            },
            "accuracy": {
                f"{sparsity:g}": {m: c[:, -1].tolist() for m, c in by_method.items()}
                for sparsity, by_method in measured.items()
            },
            "rigl_over_static": {
                f"{sparsity:g}": margin(by_method)
                for sparsity, by_method in measured.items()
                if {"rigl", "static"} <= by_method.keys()
            },
        }
        save(args.output, result)


if __name__ == "__main__":
    main()
