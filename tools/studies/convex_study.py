"""Measures what an order of the samples gains: distance from the minimum, by epoch.

SGD runs with a constant step size, the same for all orders, on regularised convex
problems (logistic regression on breast_cancer, least squares on diabetes, softmax
regression on digits, all of scikit-learn). F - F* does not reach zero: it settles at a
level that depends on the order. The levels are compared, averaged over the last ten
epochs:

    rr    a new random order in every epoch     so    one random order, kept
    mean  GraB, around the last epoch's mean    pair  GraB, of differences of pairs

The ratio to rr should be at least 5. With --projected K, mean and pair also balance
two-sided projections of the gradients to K numbers (``fidelity="projected"``); the
share of the gain that they keep is that of the logarithm of the ratio to rr. With
--groups G they also order fixed groups of G samples, which divide a step, by their mean
gradients (``fidelity="group"``). Takes a minute; seconds with --quick:

    python tools/studies/convex_study.py --quick
    python tools/studies/convex_study.py --image docs/images/convex.png \\
        --output docs/benchmarks/convex.json
    python tools/studies/convex_study.py --problems digits --projected 320 160 80
    python tools/studies/convex_study.py --groups 2 4 8 16
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import grab_xla
from per_sample_grad import Dense
from tools.record import parser_with_output, picture, save
from tools.studies.convex_problems import PROBLEMS, Problem, make_problem

PLAIN, BALANCED = ("rr", "so"), ("mean", "pair")
GROUPED = " in groups"
DEFAULT_PROBLEMS = ("breast_cancer", "diabetes", "digits")
LAST_EPOCHS = 10


class Setting(NamedTuple):
    """The step size and number of epochs, equal for all orders."""

    step_size: float
    epochs: int


# By problem and batch size: steps that are large enough for orders to matter.
SETTINGS = {
    ("breast_cancer", 1): Setting(0.01, 60),
    ("breast_cancer", 16): Setting(0.3, 60),
    ("diabetes", 1): Setting(0.005, 60),
    ("diabetes", 16): Setting(0.1, 60),
    ("digits", 1): Setting(0.05, 25),
    ("digits", 16): Setting(0.5, 40),
    ("digits-standardised", 1): Setting(0.05, 25),
    ("digits-standardised", 16): Setting(0.5, 40),
}
# Distances from the minimum by problem and order: (seeds, epochs + 1).
Curves = dict[str, dict[str, np.ndarray]]


def train(
    problem: Problem,
    order: str,
    setting: Setting,
    batch_size: int,
    seed: int,
    bar: tqdm,
) -> list[float]:
    """Returns F before the first epoch and after each epoch."""
    weights = problem.initial()
    order, of, number = order.partition(" of ")
    options: dict[str, Any] = {}
    if of and order.endswith(GROUPED):
        order = order.removesuffix(GROUPED)
        options = {"fidelity": "group", "group_size": int(number)}
    elif of:
        options = {"fidelity": "projected", "projection_size": int(number)}
    sampler = grab_xla.GraBSampler(
        problem.features,
        {"weights": weights},
        order,
        device="cpu",
        seed=seed,
        **options,
    )
    values = [problem.value(weights).item()]
    for _ in range(setting.epochs):
        for batch in torch.tensor(list(sampler)).split(batch_size):
            gradients = problem.gradients(weights, batch)
            rows = gradients
            if sampler.projection is not None:
                rows = sampler.projection.of("weights", [Dense(rows)], 2**30)
            if sampler.fidelity == "group":
                rows = rows.unflatten(0, (-1, options["group_size"])).mean(1)
            sampler.step({"weights": rows})
            weights = weights - setting.step_size * gradients.mean(0)
        values.append(problem.value(weights).item())
        bar.update()
    return values


def study(
    names: list[str], batch_size: int, seeds: list[int], orders: list[str]
) -> Curves:
    """Trains every problem in every order with every seed; returns the distances."""
    curves: Curves = {}
    settings = {name: SETTINGS[name, batch_size] for name in names}
    epochs = sum(setting.epochs for setting in settings.values())
    with tqdm(total=epochs * len(orders) * len(seeds), unit="epoch") as bar:
        for name, setting in settings.items():
            problem = make_problem(*PROBLEMS[name], multiple=16)
            minimum = problem.minimum()
            curves[name] = {}
            for order in orders:
                bar.set_description(f"{name}, {order}")
                values = [
                    train(problem, order, setting, batch_size, seed, bar)
                    for seed in seeds
                ]
                curves[name][order] = np.array(values) - minimum
    return curves


def settled(curves: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns F - F* by order: the mean over seeds and the last epochs."""
    return {
        order: float(rows[:, -LAST_EPOCHS:].mean()) for order, rows in curves.items()
    }


def ratios(curves: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns how many times further from the minimum random reshuffling settles."""
    level = settled(curves)
    return {order: level["rr"] / level[order] for order in level if order not in PLAIN}


def kept(curves: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the share of its exact kind's gain that each other fidelity keeps."""
    gain = {order: math.log(ratio) for order, ratio in ratios(curves).items()}
    kinds = {order: order.split()[0] for order in gain if " of " in order}
    return {order: gain[order] / gain[kind] for order, kind in kinds.items()}


def print_table(curves: Curves) -> None:
    print(f"F - F*, mean over seeds and the last {LAST_EPOCHS} epochs")
    for name, by_order in curves.items():
        times, share = ratios(by_order), kept(by_order)
        print(f"{name}\n{'order':24}{'F - F*':>10}{'rr/order':>10}{'kept':>8}")
        for order, value in settled(by_order).items():
            line = f"{order:24}{value:10.1e}"
            line += f"{times[order]:10.1f}" if order in times else ""
            print(line + (f"{share[order]:8.2f}" if order in share else ""))


# What a picture calls the orders.
IN_WORDS = {
    "rr": "random reshuffling", "so": "one shuffle", "mean": "mean balance",
    "pair": "pair balance",
}  # fmt: skip


def plot(curves: Curves, batch_size: int, path: Path) -> None:
    """Draws one panel per problem: the mean over seeds and their range."""
    with picture(path, len(curves), figsize=(4.5 * len(curves), 4)) as axes:
        for axis, (name, by_order) in zip(axes, curves.items()):
            for order, rows in by_order.items():
                epochs = np.arange(rows.shape[1])
                label = IN_WORDS.get(order, order)
                axis.semilogy(epochs, rows.mean(0), label=label, linewidth=1.2)
                axis.fill_between(epochs, rows.min(0), rows.max(0), alpha=0.15)
            step_size = SETTINGS[name, batch_size].step_size
            axis.set_title(f"{name}, batch {batch_size}, step size {step_size}")
            axis.set_xlabel("epoch")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("F - F*")
        axes[0].legend()


def record(curves: Curves, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what the JSON file contains."""
    return {
        "batch_size": args.batch_size,
        "seeds": args.seeds,
        "last_epochs": LAST_EPOCHS,
        "problems": {
            name: {
                **SETTINGS[name, args.batch_size]._asdict(),
                "regularisation": PROBLEMS[name][1],
                "distance": settled(by_order),
                "distance_by_seed": {
                    order: rows[:, -LAST_EPOCHS:].mean(1).tolist()
                    for order, rows in by_order.items()
                },
                "rr_over": ratios(by_order),
                "share_kept": kept(by_order),
            }
            for name, by_order in curves.items()
        },
    }


def arguments() -> argparse.Namespace:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--problems", nargs="+", choices=PROBLEMS, default=DEFAULT_PROBLEMS,
        help=f"default: {' '.join(DEFAULT_PROBLEMS)}",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=int, choices=(1, 16), default=16,
        help="samples per step; step sizes and epochs go with it. 1 takes many times "
        "as long; default: 16",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2],
        help="of orders: one run for each; default: 0 1 2",
    )  # fmt: skip
    parser.add_argument(
        "--projected", type=int, nargs="+", default=[], metavar="K",
        help="also balance projections to so many numbers",
    )  # fmt: skip
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[], metavar="G",
        help="also order groups of so many samples, a divisor of the batch size",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help="diabetes and one seed, whatever the other options say",
    )  # fmt: skip
    parser.add_argument("--image", type=Path, help="PNG to draw")
    args = parser.parse_args()
    if args.quick:
        args.problems, args.seeds, args.batch_size = ["diabetes"], [0], 16
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # the matrices are small: several threads only wait
    orders = [*PLAIN, *BALANCED]
    orders += [f"{order} of {size}" for order in BALANCED for size in args.projected]
    orders += [
        f"{order}{GROUPED} of {size}" for order in BALANCED for size in args.groups
    ]
    curves = study(args.problems, args.batch_size, args.seeds, orders)
    print_table(curves)
    if args.image:
        plot(curves, args.batch_size, args.image)
    save(args.output, record(curves, args))


if __name__ == "__main__":
    main()
