"""Measures what Seesaw costs and saves: larger batches in place of a lower rate.

An MLP 64-128-10 is trained on the 1437 of scikit-learn's digits that are not tested on,
with AdamW, in three ways that see equally many samples, in the same order:

- cosine: constant batches, and a learning rate that falls as a cosine;
- halved: constant batches, and a learning rate that halves where the cosine has halved;
- seesaw: batches that double there, and a learning rate that is divided by the square
  root of two (arXiv:2510.14717), up to a largest batch.

Takes about two minutes; a few seconds with --quick:

    python tools/studies/seesaw_study.py --output docs/benchmarks/seesaw.json
"""

from __future__ import annotations

import argparse
import functools
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
from tools.record import parser_with_output, save
from tools.studies.rigl_digits import Digits, digits

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("cosine", "halved", "seesaw")


def rate(way: str, part: float) -> float:
    """Returns the reference learning rate over its peak when a part of all is done."""
    cosine = max((1 + math.cos(math.pi * min(part, 1.0))) / 2, 2.0**-60)
    return cosine if way == "cosine" else 0.5 ** math.floor(1e-9 - math.log2(cosine))


@functools.cache
def seesaw_trace(first: int, most: int, total: int) -> vbs.Trace:
    """Returns what ``vbs make seesaw`` makes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "seesaw.csv")
        words = ["make", "seesaw", "--first", first, "--most", most]
        words += ["--total-samples", total, "--out", path]
        command = [sys.executable, "-m", "variable_batch_size", *map(str, words)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return vbs.Trace(path)


def train(
    way: str, seed: int, args: argparse.Namespace, data: Digits
) -> dict[str, float]:
    """Trains once; returns losses, accuracy and the number of updates."""
    num_samples = len(data.train_labels)
    total = args.epochs * num_samples // args.most * args.most
    trace = args.batch_size
    if way == "seesaw":
        trace = seesaw_trace(args.batch_size, args.most, total)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    sampler = vbs.CustomSampler(
        data.train_labels,
        trace,
        seed=1000 * seed,
        minibatch_size=args.batch_size,
        verbose=False,
    )
    inner = torch.optim.AdamW(model.parameters(), args.lr)
    optimizer = vbs.RootRuleOptimizer(inner, sampler, args.batch_size)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: rate(way, n * args.batch_size / total)
    )
    optimizer.attach(scheduler, unit="samples", every=args.batch_size)
    used, epoch = [0], 0  # samples after every update
    optimizer.attach(lambda update: used.append(used[-1] + update.batch_size))
    while used[-1] < total and sampler.schedule.plan(epoch, 1).num_steps:
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for rows in sampler:
            if used[-1] >= total:
                break
            loss = F.cross_entropy(
                model(data.train_pixels[rows]), data.train_labels[rows]
            )
            loss.backward()
            optimizer.step()
        epoch += 1
    with torch.no_grad():
        scores = model(data.test_pixels)
        fitted = F.cross_entropy(model(data.train_pixels), data.train_labels)
    right = (scores.argmax(1) == data.test_labels).float().mean()
    return {
        "train_loss": fitted.item(),
        "test_loss": F.cross_entropy(scores, data.test_labels).item(),
        "accuracy": 100 * right.item(),
        "updates": len(used) - 1,
        "samples": used[-1],
    }


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=5, help="default: %(default)s")
    add("--epochs", type=int, default=40, help="default: %(default)s")
    add("--batch-size", type=int, default=16, help="the first; default: %(default)s")
    add("--most", type=int, default=256, help="largest batch; default: %(default)s")
    add("--lr", type=float, default=0.002, help="the peak; default: %(default)s")
    add("--quick", action="store_true", help="two seeds, eight epochs")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.epochs = 2, 8
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)
    data = digits()
    result: dict[str, Any] = {}
    for way in WAYS:
        runs = [train(way, seed, args, data) for seed in range(args.seeds)]
        result[way] = {
            name: {"mean": np.mean(values), "deviation": np.std(values)}
            for name in runs[0]
            if (values := [run[name] for run in runs])
        }
        told = ", ".join(
            f"{name.replace('_', ' ')} {n['mean']:.4g} ± {n['deviation']:.2g}"
            for name, n in result[way].items()
        )
        print(f"{way:>7}: {told}")
    saved = (
        1 - result["seesaw"]["updates"]["mean"] / result["cosine"]["updates"]["mean"]
    )
    print(f"Seesaw makes {saved:.1%} fewer updates")
    names = ("seeds", "epochs", "batch_size", "most", "lr")
    settings = {name: getattr(args, name) for name in names}
    save(args.output, {"settings": settings, "ways": result, "fewer_updates": saved})


if __name__ == "__main__":
    main()
