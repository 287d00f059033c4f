"""Measures an elastic step beside that of DistributedDataParallel (DDP) or FSDP2.

Both train the same model with SGD and momentum on processes of one thread each. DDP
sums gradients while the backward pass still computes others, in buckets of which
gradients are views, and skips the sum in all minibatches of a step but the last. So
does FSDP2; beside it the elastic wrapper trains a model that is sharded alike. A
machine's speed drifts, so a few elastic steps are timed between as many of two other
models, and divided by their mean; how these two differ says what a ratio is worth.
The result is the median of several launches, since where a launch has its memory
decides about several percent. malloc keeps what is freed: else some launches give the
memory of gradients back, and every step faults it in again.

    python tools/benchmarks/bench_ddp.py --output ddp.json
    python tools/benchmarks/bench_ddp.py --against FSDP2 --output fsdp2.json
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica
from tools.record import parser_with_output, row, save
from tools.side_by_side import keep_freed_pages

LR, MOMENTUM, CLASSES = 0.01, 0.9, 10
EPOCH = 100  # steps
GOALS = {"DDP": 1.03, "FSDP2": 1.05}


def mlp(num_layers: int, width: int) -> nn.Module:
    """Returns a network of square layers, and its classifier."""
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def cnn(width: int) -> nn.Module:
    """Returns three convolutions on images of 16 x 16 pixels, and a classifier."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 16, 16))]
    channels = 1
    for new in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(channels, new, 3, 2, 1), nn.BatchNorm2d(new), nn.ReLU()]
        channels = new
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 4, CLASSES))


# From the name to the model, its number of inputs and the size of a minibatch.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "mlp 4 x 512": (lambda: mlp(4, 512), 512, 32),
    "mlp 8 x 1024": (lambda: mlp(8, 1024), 1024, 32),
    "cnn": (lambda: cnn(64), 256, 32),
}


class Loop:
    """One replica's model, data and optimizer, equal for both."""

    def __init__(self, name: str, sharded: bool = False) -> None:
        make, num_inputs, size = MODELS[name]
        self.replica = xla_replica.current()
        with self.replica.seeded(0):
            self.model = make()
            inputs = torch.randn(size, num_inputs)
        self.model.to(self.replica.device)
        if sharded:
            for layer in self.model:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer)
            fully_shard(self.model)
        self.batch = self.replica.send((inputs, torch.arange(size) % CLASSES))
        self.inner = torch.optim.SGD(self.model.parameters(), LR, momentum=MOMENTUM)

    def backward(self, model: nn.Module) -> None:
        inputs, labels = self.batch
        F.cross_entropy(model(inputs), labels).backward()


def elastic(
    name: str, substeps: int, num_steps: int, sharded: bool, overlap: bool
) -> Callable[[], None]:
    """Returns a function that trains so many steps with the elastic wrapper."""
    loop = Loop(name, sharded)
    size = substeps * loop.replica.num_replicas
    sampler = vbs.CustomSampler(
        dataset_size=size * EPOCH,
        trace=[size],
        minibatch_size=1,
        on_end="hold",
        verbose=False,
    )
    optimizer = vbs.ConstantOptimizer(loop.inner, sampler, overlap=overlap)

    def epochs() -> Iterator[Iterable[Any]]:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            optimizer.set_epoch(epoch)
            yield sampler

    minibatches = itertools.chain.from_iterable(epochs())

    def run() -> None:
        for _ in itertools.islice(minibatches, num_steps * substeps):
            loop.backward(loop.model)
            optimizer.step()

    return run


def ddp(name: str, substeps: int, num_steps: int) -> Callable[[], None]:
    """Returns a function that trains so many steps with DDP."""
    loop = Loop(name)
    model = DistributedDataParallel(loop.model, gradient_as_bucket_view=True)

    def run() -> None:
        for _ in range(num_steps):
            for substep in range(substeps):
                last = substep == substeps - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loop.backward(model)
            loop.inner.step()
            loop.inner.zero_grad()

    return run


def fsdp2(name: str, substeps: int, num_steps: int) -> Callable[[], None]:
    """Returns a function that trains so many steps with FSDP2."""
    loop = Loop(name, sharded=True)
    for module in loop.model.modules():
        if isinstance(module, FSDPModule):  # gloo has no means
            module.set_force_sum_reduction_for_comms(True)

    def run() -> None:
        for _ in range(num_steps):
            for substep in range(substeps):
                loop.model.set_requires_gradient_sync(substep == substeps - 1)
                loop.backward(loop.model)
            loop.inner.step()
            loop.inner.zero_grad()

    return run


OTHERS = {"DDP": ddp, "FSDP2": fsdp2}


def seconds_per_step(
    rank: int,
    name: str,
    against: str,
    substeps: int,
    num_steps: int,
    rounds: int,
    threads: int,
    overlap: bool,
) -> dict[str, list[float]]:
    """Returns seconds per step, of every round, with two models of the other kind."""
    torch.set_num_threads(threads)
    keep_freed_pages()
    replica = xla_replica.current()
    loops = {
        "first": OTHERS[against](name, substeps, num_steps),
        "elastic": elastic(name, substeps, num_steps, against == "FSDP2", overlap),
        "second": OTHERS[against](name, substeps, num_steps),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds + 2):
        for which, run in list(loops.items())[:: 1 if number % 2 else -1]:
            replica.barrier()
            start = time.perf_counter()
            run()
            replica.barrier()
            if number >= 2:
                seconds[which].append((time.perf_counter() - start) / num_steps)
    return seconds


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument("--num-replicas", type=int, default=2, help="default: 2")
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=MODELS, help="default: all"
    )
    parser.add_argument("--against", default="DDP", choices=OTHERS, help="default: DDP")
    parser.add_argument(
        "--substeps",
        type=int,
        nargs="+",
        default=[1, 4],
        help="minibatches of a step on each replica (default: 1 4)",
    )
    parser.add_argument("--launches", type=int, default=4, help="default: 4")
    parser.add_argument("--rounds", type=int, default=30, help="of each (default: 30)")
    parser.add_argument(
        "--steps", type=int, default=4, help="steps in a round (default: 4)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of each process (default: 1)"
    )
    parser.add_argument(
        "--no-overlap", action="store_true", help="sum when a step is complete"
    )
    args = parser.parse_args()
    result: dict[str, Any] = {
        "replicas": args.num_replicas,
        "overlap": not args.no_overlap,
        "rows": [],
    }
    cases = [(name, substeps) for name in args.models for substeps in args.substeps]
    for name, substeps in tqdm(cases, desc="models", disable=None):
        numbers = (substeps, args.steps, args.rounds, args.threads)
        numbers += (not args.no_overlap,)
        seconds: dict[str, list[float]] = {}
        for _ in range(args.launches):
            of_launch = xla_replica.launch(
                seconds_per_step,
                (name, args.against, *numbers),
                args.num_replicas,
                "cpu",
                timeout=1200.0,
            )[0]
            for which, found in of_launch.items():
                seconds.setdefault(which, []).extend(found)
        rounds = [*zip(seconds["elastic"], seconds["first"], seconds["second"])]
        ratios = [2 * mine / (first + second) for mine, first, second in rounds]
        nulls = [second / first for _, first, second in rounds]
        of = f"{name}, {substeps} substeps"
        work, goal = f"elastic step over {args.against}: {of}", GOALS[args.against]
        result["rows"].append(row(work, ratios, at_most=goal))
        result["rows"].append(row(f"{args.against} over another: {of}", nulls))
        ms = [1e3 * each for each in seconds["elastic"]]
        result["rows"].append(row(f"elastic step: {of}", ms, "ms"))
    save(args.output, result)


if __name__ == "__main__":
    main()
