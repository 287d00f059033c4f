"""Measures what exact sums cost: elastic steps with and without them, side by side.

Each step has two minibatches on one replica. The processor times of both are taken in
turn, in one process on one thread, so that what else the machine does is in both.

    python tools/benchmarks/bench_exact.py --output docs/benchmarks/bench_exact.json
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
from tools.benchmarks.bench_step import make_model
from tools.record import parser_with_output, row, save
from tools.side_by_side import side_by_side
from xla_replica import LocalReplica


def wide_mlp() -> nn.Module:
    """Returns a network of 8.4 million parameters, each used once in a sample."""
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))


# By name: a model, the shape of a minibatch of its inputs, and the goal.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float | None]] = {
    "MNIST CNN, minibatches of 32": (lambda: make_model(28, 1), (32, 1, 28, 28), 1.1),
    "the CNN four times as wide, of 64": (
        lambda: make_model(28, 4), (64, 1, 28, 28), 1.1,
    ),
    "MLP of 8.4 M, minibatches of 32": (wide_mlp, (32, 1024), 1.6),
    "MLP of 8.4 M, minibatches of 256": (wide_mlp, (256, 1024), None),
}  # fmt: skip


def elastic(
    inner: torch.optim.Optimizer,
    minibatch: int,
    num_minibatches: int,
    exact: nn.Module | None = None,
) -> tuple[vbs.ElasticOptimizer, Iterator[Any]]:
    """Returns a wrapper of the linear rule, and its minibatches without an end."""
    size = num_minibatches * minibatch
    sampler = vbs.CustomSampler(
        dataset_size=10_000 * size, trace=[size], minibatch_size=minibatch,
        on_end="hold", verbose=False,
    )  # fmt: skip
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=size, exact=exact)
    optimizer.set_epoch(0)
    return optimizer, itertools.chain.from_iterable(itertools.repeat(sampler))


def elastic_step(
    made: Callable[[], nn.Module], shape: tuple[int, ...], is_exact: bool, device: str
) -> Callable[[], None]:
    """Returns a function that makes one elastic update of two minibatches."""
    torch.manual_seed(0)
    model, inputs = made().to(device), torch.randn(shape).to(device)
    inner = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    exact = model if is_exact else None
    optimizer, minibatches = elastic(inner, shape[0], 2, exact)
    targets = (torch.arange(shape[0]) % 10).to(device)

    def step() -> None:
        made = 0
        while not made:
            next(minibatches)
            F.cross_entropy(model(inputs), targets).backward()
            made = optimizer.step()

    return step


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=30, help="how often each is timed; default: 30"
    )
    parser.add_argument("--device", default="cpu", help="default: cpu")
    options = parser.parse_args()
    device = options.device
    torch.set_num_threads(1)
    if device != "cpu":
        torch.use_deterministic_algorithms(True)
    rows = []
    for name, (made, shape, goal) in MODELS.items():
        plain, exact = (elastic_step(made, shape, e, device) for e in (False, True))
        times = side_by_side(
            plain, {"exact": exact}, options.rounds, name, device=device
        )
        work = f"exact step over elastic step: {name}"
        rows.append(row(work, times.rounds["exact"], at_most=goal))
        rows.append(row(f"elastic step: {name}", 1e3 * times.plain_seconds, "ms"))
    save(options.output, {"device": LocalReplica(device).device_model, "rows": rows})


if __name__ == "__main__":
    main()
