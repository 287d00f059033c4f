"""Measures what an elastic step costs, side by side with other loops.

1. An elastic step against a hand-written loop that accumulates, all-reduces and steps,
   and one with AdaScale, which measures gradient noise, against one of the linear rule:
   ratios within the rounds of one run, in which all take turns on equal models.
2. Compilations with several distinct batch sizes, on the most replicas.

    python tools/benchmarks/bench_step.py --output docs/benchmarks/bench_step.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica
from tools.record import parser_with_output, row, save

MINIBATCH = 32
LR = 0.05


def make_model(side: int, width: int) -> nn.Module:
    """Returns the network of variable_train_mnist.py, ``width`` times as wide."""
    layers: list[nn.Module] = []
    channels = 1
    for new, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
        layers += [
            nn.Conv2d(channels, new, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(new),
            nn.ReLU(),
        ]
        channels, side = new, -(-side // stride)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side**2, 10))


class Setup:
    """One replica's model, data and inner optimizer, equal for all loops."""

    def __init__(self, trace: list[int], num_steps: int, side: int, width: int) -> None:
        self.replica = xla_replica.current()
        with self.replica.seeded(0):
            self.model = make_model(side, width)
            images = torch.randn(MINIBATCH, 1, side, side)
        self.model.to(self.replica.device)
        self.minibatch = self.replica.send((images, torch.arange(MINIBATCH) % 10))
        self.inner = torch.optim.SGD(self.model.parameters(), LR, momentum=0.9)
        steps = np.resize(trace, num_steps)
        self.sampler = vbs.CustomSampler(
            dataset_size=int(steps.sum()),
            trace=steps,
            minibatch_size=MINIBATCH,
            on_end="cycle",
            verbose=False,
        )

    def backward(self) -> None:
        images, labels = self.minibatch
        F.cross_entropy(self.model(images), labels).backward()


def linear_epoch(setup: Setup) -> Callable[[int], None]:
    """Returns a loop over an epoch with the linear rule."""
    return elastic_epoch(setup, vbs.LinearRuleOptimizer)


def adascale_epoch(setup: Setup) -> Callable[[int], None]:
    """Returns a loop over an epoch with AdaScale."""
    return elastic_epoch(setup, vbs.AdaScaleOptimizer)


def elastic_epoch(
    setup: Setup, wrapper: type[vbs.ElasticOptimizer]
) -> Callable[[int], None]:
    """Returns a loop over an epoch with an optimizer wrapper."""
    optimizer = wrapper(setup.inner, setup.sampler, ref_batchsize=128)

    def run(epoch: int) -> None:
        setup.sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for _ in setup.sampler:
            setup.backward()
            optimizer.step()

    return run


def hand_written_epoch(setup: Setup) -> Callable[[int], None]:
    """Returns the loop that a careful user of torch_xla writes, without our checks."""
    replica, inner = setup.replica, setup.inner
    gradients = [torch.zeros_like(p) for p in setup.model.parameters()]
    for parameter, gradient in zip(setup.model.parameters(), gradients):
        parameter.grad = gradient
    replica.sync()
    plan = setup.sampler.plan
    substeps = plan.num_substeps(replica.rank).tolist()
    minibatches = plan.num_minibatches.tolist()

    def run(epoch: int) -> None:
        del epoch
        for mine, total in zip(substeps, minibatches):
            for _ in range(mine):
                setup.backward()
                replica.sync()
            divisor = replica.scalar(total)
            replica.all_reduce_(gradients)
            for gradient in gradients:
                gradient.div_(divisor)
            inner.param_groups[0]["lr"] = LR * total * MINIBATCH / 128
            inner.step()
            for gradient in gradients:
                gradient.zero_()
            replica.sync()

    return run


def timed(
    replica: xla_replica.Replica, run: Callable[[int], None], epoch: int
) -> float:
    """Returns the seconds of an epoch, with all replicas waiting at both ends."""
    replica.barrier()
    start = time.perf_counter()
    run(epoch)
    replica.barrier()
    return time.perf_counter() - start


# What is compared, with its goal.
COMPARED = {("linear", "by hand"): 1.02, ("adascale", "linear"): 1.05}
LOOPS = {
    "by hand": hand_written_epoch,
    "linear": linear_epoch,
    "adascale": adascale_epoch,
}


def compare_replica(
    rank: int, trace: list[int], num_steps: int, rounds: int, side: int, width: int
) -> dict[str, list[float]]:
    """Returns seconds per step of each loop, in alternating rounds."""
    loops = {}
    for name, made in LOOPS.items():
        setup = Setup(trace, num_steps, side, width)
        loops[name] = (setup, made(setup))
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for epoch in range(rounds + 2):
        # In the other sequence every other round: later ones find warmer caches.
        order = list(loops.items())[:: 1 if epoch % 2 else -1]
        for name, (setup, run) in order:
            elapsed = timed(setup.replica, run, epoch)
            if epoch >= 2:  # the first two compile
                seconds[name].append(elapsed / num_steps)
    return seconds


def count_replica(
    rank: int, num_sizes: int, num_steps: int, side: int, width: int
) -> int:
    """Returns all compilations of an epoch whose mean batch size is always the same."""
    replica = xla_replica.current()
    base = 2 * replica.num_replicas
    spread = np.linspace(-base + 1, base - 1, num_sizes).round().astype(int)
    sizes = (base + spread) if num_sizes > 1 else np.array([base])
    assert len(set(sizes.tolist())) == num_sizes
    setup = Setup((sizes * MINIBATCH).tolist(), num_steps, side, width)
    run = linear_epoch(setup)
    with xla_replica.count(replica) as counts:
        timed(replica, run, 0)
    return counts.compilations


def compare(num_replicas: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Returns seconds per step of each loop, in every round."""
    trace = [2 * num_replicas * MINIBATCH]
    return xla_replica.launch(
        compare_replica,
        (trace, args.steps, args.rounds, args.side, args.width),
        num_replicas,
        args.device,
    )[0]


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--device", choices=xla_replica.DEVICES, help="default: see xla_replica.launch"
    )
    parser.add_argument(
        "--num-replicas", type=int, nargs="+", default=[1, 8], help="default: 1 8"
    )
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 4, 16],
        help="how many distinct ones programs are counted of (default: 1 4 16)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=15, help="of each loop (default: 15)"
    )
    parser.add_argument("--steps", type=int, default=8, help="of a round (default: 8)")
    parser.add_argument(
        "--side", type=int, default=28, help="of an image, in pixels (default: 28)"
    )
    parser.add_argument(
        "--width", type=int, default=1, help="of the network (default: 1)"
    )
    args = parser.parse_args()
    result: dict[str, Any] = {"image_side": args.side, "width": args.width, "rows": []}

    where = (args.device or "xla").upper()
    curves: dict[str, list[float]] = {" over ".join(names): [] for names in COMPARED}
    result["milliseconds"] = {}
    for num_replicas in args.num_replicas:
        found = compare(num_replicas, args)
        result["milliseconds"][num_replicas] = {
            name: 1e3 * statistics.median(seconds) for name, seconds in found.items()
        }
        for (mine, other), goal in COMPARED.items():
            ratios = [a / b for a, b in zip(found[mine], found[other])]
            key = f"{mine} over {other}"
            work = f"step, {where}, {key}, replicas: {num_replicas}"
            result["rows"].append(row(work, ratios, at_most=goal))
            curves[key].append(statistics.median(ratios))
    num_replicas = max(args.num_replicas)
    for num_sizes in args.batch_sizes:
        if num_sizes > 4 * num_replicas - 1:
            continue
        [compilations, *_] = xla_replica.launch(
            count_replica,
            (num_sizes, 16, args.side, args.width),
            num_replicas,
            args.device,
        )
        work = f"compilations, {num_sizes} batch sizes, replicas: {num_replicas}"
        result["rows"].append(row(work, compilations))
    result["curves"] = [
        {
            "x label": "replicas",
            "x": args.num_replicas,
            "y label": "time of a step over that of another, XLA",
            "y": curves,
        }
    ]
    save(args.output, result)


if __name__ == "__main__":
    main()
