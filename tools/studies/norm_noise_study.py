"""Compares two estimates of gradient noise, and what measuring costs.

A byte-level GPT trains on the text of this repository with AdamW. Every step has
several minibatches, so that the noise of all parameters is known from their gradients;
the normalisation layers' weights alone tell another noise scale, sample by sample (Gray
et al. 2024, arXiv:2411.00999). Printed are the correlation of the two over training (of
their logarithms), and the factor between them. Then steps of a single minibatch are
timed: an update without any measuring, with each of the two estimators, and AdaScale's
gain. Times are of the processor, each between two of measuring nothing, on one thread.

Takes about three minutes; half a minute with --quick:

    python tools/studies/norm_noise_study.py --output docs/benchmarks/norm_noise.json
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
from examples.ordering import text_data
from examples.ordering.language_model import ByteGPT
from tools.record import parser_with_output, picture, save
from tools.side_by_side import side_by_side

WAYS = ("nothing", "all gradients", "norm layers")


class Training:
    """A model, its data and an optimizer that measures noise in one of the `WAYS`."""

    def __init__(self, args: argparse.Namespace, batch_size: int, way: str) -> None:
        torch.manual_seed(args.seed)
        files = text_data.choose(None, None, "", 0)
        self.windows = text_data.load(files, args.context, 2_000_000)[0]
        self.model = ByteGPT(
            args.context, args.width, args.num_layers, num_heads=4, tied=True
        )
        self.sampler = vbs.CustomSampler(
            self.windows, batch_size, minibatch_size=args.minibatch_size, verbose=False
        )
        options = vbs.NoiseOptions(time_constant=args.time_constant)
        self.optimizer = vbs.RootRuleOptimizer(
            torch.optim.AdamW(self.model.parameters(), args.lr),
            self.sampler,
            args.minibatch_size,
            noise=way != "nothing" and options,
        )
        if way == "norm layers":
            self.optimizer.noise.use_norm_layers(self.model)
        self.updates = self._updates()

    def _updates(self) -> Iterator[None]:
        for epoch in itertools.count():
            self.sampler.set_epoch(epoch)
            self.optimizer.set_epoch(epoch)
            for rows in self.sampler:
                inputs, targets = self.windows[rows]
                logits = self.model(inputs)
                F.cross_entropy(
                    logits.flatten(0, 1), targets.flatten().long()
                ).backward()
                if self.optimizer.step():
                    yield


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """Returns both noise scales over training, their correlation and their factor."""
    training = Training(args, args.num_minibatches * args.minibatch_size, "norm layers")
    rows = []
    for update in tqdm(range(args.num_updates), disable=args.no_progress):
        next(training.updates)
        if update >= args.skip and update % args.every == 0:
            found = training.optimizer.noise.measure()
            norm_layers = found.noise_scale / found.norm_factor
            rows.append((update, found.noise_scale, norm_layers))
    update, whole, norm_layers = np.array(rows).T
    known = np.isfinite(whole) & np.isfinite(norm_layers)
    update, whole, norm_layers = update[known], whole[known], norm_layers[known]
    factors = whole / norm_layers
    return {
        "update": update.tolist(),
        "all gradients": whole.tolist(),
        "norm layers": norm_layers.tolist(),
        "correlation of logarithms": np.corrcoef(np.log(whole), np.log(norm_layers))[
            0, 1
        ],
        "factor": {
            "median": np.median(factors),
            "least": factors.min(),
            "most": factors.max(),
        },
    }


def timed(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the processor time of one-minibatch updates over that of measuring none.

    "nothing again" says how exact the others are. And the gain that AdaScale would use
    at four times the reference batch size.
    """
    plain = Training(args, args.minibatch_size, "nothing")
    trainings = {
        "nothing again": Training(args, args.minibatch_size, "nothing"),
        **{way: Training(args, args.minibatch_size, way) for way in WAYS[1:]},
    }
    steps = {
        way: functools.partial(run, training, args.updates_per_round)
        for way, training in trainings.items()
    }
    found = side_by_side(
        functools.partial(run, plain, args.updates_per_round), steps, args.rounds,
        warm_up=1, disable=args.no_progress,
    )  # fmt: skip
    gains = {
        way: trainings[way].optimizer.noise.gain(4 * args.minibatch_size)
        for way in WAYS[1:]
    }
    return {
        "time over measuring nothing": found.ratios,
        "gain at four times": gains,
    }


def run(training: Training, num_updates: int) -> None:
    """Makes so many updates."""
    for _ in range(num_updates):
        next(training.updates)


def draw(path: Path, found: dict[str, Any]) -> None:
    """Draws both noise scales over the updates."""
    with picture(path, 1, figsize=(7, 4)) as [axes]:
        for name in WAYS[1:]:
            axes.plot(found["update"], found[name], label=name)
        axes.set(xlabel="update", ylabel="noise scale, samples", yscale="log")
        axes.legend()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    add("--image", type=Path, help="a picture of both noise scales over training")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--num-updates", type=int, default=250, help="default: %(default)s")
    add("--num-minibatches", type=int, default=16, help="a step; default: %(default)s")
    add("--minibatch-size", type=int, default=8, help="windows; default: %(default)s")
    add("--context", type=int, default=64, help="bytes; default: %(default)s")
    add("--width", type=int, default=128, help="default: %(default)s")
    add("--num-layers", type=int, default=2, help="default: %(default)s")
    add("--lr", type=float, default=0.001, help="default: %(default)s")
    add("--time-constant", type=float, default=320.0, help="default: %(default)s")
    add("--skip", type=int, default=10, help="updates at first; default: %(default)s")
    add("--every", type=int, default=2, help="updates; default: %(default)s")
    add("--rounds", type=int, default=60, help="of timing; default: %(default)s")
    add("--updates-per-round", type=int, default=4, help="default: %(default)s")
    add("--no-progress", action="store_true", help="no progress bars")
    add("--quick", action="store_true", help="a small model, few updates and rounds")
    args = parser.parse_args(argv)
    if args.quick:
        args.width, args.num_layers, args.context = 32, 1, 32
        args.num_updates, args.rounds, args.updates_per_round = 60, 3, 5
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)
    found = compared(args) | timed(args)
    factor = found["factor"]
    print(
        f"correlation {found['correlation of logarithms']:.3f}, factor "
        f"{factor['median']:.2f} ({factor['least']:.2f} to {factor['most']:.2f})"
    )
    for way, ratio in found["time over measuring nothing"].items():
        gain = found["gain at four times"].get(way)
        told = "" if gain is None else f", gain {gain:.2f} with one minibatch"
        print(f"{way}: {ratio:.3f} times the time{told}")
    if args.image is not None:
        draw(args.image, found)
    settings = {k: v for k, v in vars(args).items() if isinstance(v, (int, float))}
    save(args.output, {"settings": settings, **found})


if __name__ == "__main__":
    main()
