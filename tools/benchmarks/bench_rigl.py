"""Measures what sparse training costs, side by side on ResNet-50.

1. An ordinary step at 90 % sparsity over the same step dense: forward, backward, SGD
   with momentum. Goal: at most 1.03.
2. A topology update against rigl-torch 0.5.2 on the same weights and gradients, which
   is installed into a temporary folder. Goal: at least 3 times faster.

Both are medians over rounds of the ratio within a round, in which the two kinds take
turns, so that other work of the machine affects both. The time of a step's sparse part
does not depend on the batch, but its share does: --batch-size and --image-side are
recorded. Each part ends after --minutes, so the whole takes less than six; on a busy
machine it has fewer rounds.

    python tools/benchmarks/bench_rigl.py --output docs/benchmarks/bench_rigl.json
    python tools/benchmarks/bench_rigl.py --only-steps --rounds 20
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

from rigl_xla import RigLScheduler, weights_of
from tools.record import parser_with_output, row, save
from tools.references import rigl_torch_reference
from tools.references.resnet50 import resnet50
from xla_replica import LocalReplica

OPTIONS = {"dense_allocation": 0.1, "T_end": 10**6, "ignore_linear_layers": False}
Seconds = dict[str, list[float]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)


def in_turns(
    functions: Mapping[str, Callable[[], float]],
    rounds: int,
    minutes: float,
    what: str,
) -> Seconds:
    """Returns the seconds of each function in each round, taking turns to go first.

    Ends before ``rounds`` if one more would probably take longer than ``minutes`` in
    all; one round is always run.
    """
    names, begin = list(functions), time.perf_counter()
    found: Seconds = {name: [] for name in names}
    for turn in tqdm(range(rounds), desc=what, unit="round"):
        spent = time.perf_counter() - begin
        if turn and spent * (turn + 1) / turn > 60 * minutes:
            break
        for name in names if turn % 2 == 0 else names[::-1]:
            found[name].append(functions[name]())
    return found


def ratios_of(seconds: Seconds, numerator: str, denominator: str) -> list[float]:
    """Returns the ratios of all rounds."""
    return [a / b for a, b in zip(seconds[numerator], seconds[denominator])]


def timed(function: Callable[[], Any], device: str) -> float:
    wait = LocalReplica(device).wait
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def ordinary_steps(
    rounds: int, minutes: float, side: int, batch_size: int, device: str
) -> dict[str, Any]:
    """Returns the ratio of steps without a topology update, sparse over dense."""
    images = torch.randn(batch_size, 3, side, side).to(device)
    labels = torch.arange(batch_size).to(device)
    steps: dict[str, Callable[[], float]] = {}
    pruners = []
    for kind in ("dense", "sparse"):
        torch.manual_seed(0)
        model = resnet50().to(device)
        optimizer = sgd(model)
        pruner = None
        if kind == "sparse":
            pruner = RigLScheduler(model, optimizer, delta=10**5, **OPTIONS)
            pruners.append(pruner)

        def step(model=model, optimizer=optimizer, pruner=pruner) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            if pruner is None or pruner():
                optimizer.step()

        step()  # creates momentum and maps memory
        steps[kind] = lambda step=step: timed(step, device)
    seconds = in_turns(steps, rounds, minutes, "steps")
    assert all(pruner.rigl_steps == 0 for pruner in pruners)
    return row(
        f"a sparse step over a dense one: ResNet-50, {batch_size} images of {side}",
        ratios_of(seconds, "sparse", "dense"),
        at_most=1.03,
    )


class Weights(nn.Module):
    """ResNet-50's weights without its activations, with constant gradients."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(w.module for w in weights_of(resnet50()))
        self.to(device)
        for layer in self.layers:
            layer.bias = None
        draw = torch.Generator().manual_seed(0)
        self.directions = [
            torch.randn(layer.weight.shape, generator=draw).to(device)
            for layer in self.layers
        ]

    def loss(self) -> torch.Tensor:
        pairs = zip(self.layers, self.directions)
        return torch.stack([(layer.weight * d).sum() for layer, d in pairs]).sum()


def topology_updates(
    theirs: Any, rounds: int, minutes: float, device: str
) -> dict[str, Any]:
    """Returns the ratio of calls that change the topology, theirs over ours."""
    makers = {"rigl-torch": theirs, "rigl_xla": RigLScheduler}
    torch.manual_seed(0)
    model = Weights(device)
    updates: dict[str, Callable[[], float]] = {}
    for kind, maker in makers.items():
        built = copy.deepcopy(model)
        optimizer = sgd(built)
        pruner = maker(built, optimizer, delta=2, **OPTIONS)

        def update(built=built, optimizer=optimizer, pruner=pruner) -> float:
            for _ in range(2):
                optimizer.zero_grad()
                built.loss().backward()
                before = pruner.rigl_steps
                seconds = timed(pruner, device)
                if pruner.rigl_steps == before:
                    optimizer.step()
            assert pruner.rigl_steps == before + 1
            return seconds

        updates[kind] = update
    seconds = in_turns(updates, rounds, minutes, "updates")
    ratios = ratios_of(seconds, "rigl-torch", "rigl_xla")
    work = "a topology update, rigl-torch over rigl_xla: ResNet-50"
    return row(work, ratios, at_least=3.0)


@contextmanager
def rigl_torch() -> Iterator[Any]:
    """Yields rigl-torch's scheduler, installed into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        error = rigl_torch_reference.install(Path(folder))
        if error is not None:
            sys.exit(
                f"rigl-torch cannot be installed; --only-steps needs none: {error}"
            )
        with rigl_torch_reference.imported(Path(folder)) as scheduler:
            yield scheduler


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=12, help="of steps (default: 12)")
    add("--update-rounds", type=int, default=5, help="of updates (default: 5)")
    add("--minutes", type=float, default=2.5, help="of each part (default: 2.5)")
    add("--device", default="cpu", help="default: cpu")
    add("--threads", type=int, help="of torch (default: its own choice)")
    add("--image-side", type=int, default=224, help="pixels (default: 224)")
    add("--batch-size", type=int, default=32, help="of a step (default: 32)")
    add("--only-steps", action="store_true", help="without rigl-torch")
    add("--only-updates", action="store_true", help="without steps")
    args = parser.parse_args(argv)
    for name in ("rounds", "update_rounds", "threads", "image_side", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.only_steps and args.only_updates:
        parser.error("--only-steps and --only-updates leave nothing to do")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    result: dict[str, Any] = {
        "device": LocalReplica(args.device).device_model,
        "threads": torch.get_num_threads(),
        "load at the beginning": os.getloadavg()[0],
        "rows": [],
    }
    if not args.only_updates:
        parts = args.rounds, args.minutes, args.image_side, args.batch_size
        result["rows"].append(ordinary_steps(*parts, args.device))
    if not args.only_steps:
        with rigl_torch() as theirs:
            parts = args.update_rounds, args.minutes, args.device
            found = topology_updates(theirs, *parts)
        result["rows"].append(found)
    result["load at the end"] = os.getloadavg()[0]
    save(args.output, result)


if __name__ == "__main__":
    main()
