"""What sparse training costs on a CPU, measured side by side.

1. An ordinary step of ResNet-50 at 90 % sparsity against the same step dense, in
   alternating rounds of one run: a ratio. Needs torchvision.
2. A topology update on ResNet-50's weights against rigl-torch 0.5.2, which is installed
   into a folder of its own: a ratio.

    python tools/bench_rigl.py --output docs/benchmarks/bench_rigl.json
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rigl_xla import RigLScheduler

OPTIONS = {"dense_allocation": 0.1, "T_end": 10**6, "ignore_linear_layers": False}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)


def timed(
    function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> float:
    start = clock()
    function()
    return clock() - start


def ordinary_steps(rounds: int, side: int, batch_size: int) -> dict[str, Any]:
    """CPU seconds of a step of each kind, and the median of the rounds' ratios.

    Of all threads: other people's load on the machine counts for less than in time.
    """
    from torchvision.models import resnet50

    images = torch.randn(batch_size, 3, side, side)
    labels = torch.arange(batch_size)
    steps: dict[str, Callable[[], Any]] = {}
    for kind in ("dense", "sparse"):
        model = resnet50()
        optimizer = sgd(model)
        sparse = kind == "sparse"
        pruner = RigLScheduler(model, optimizer, **OPTIONS) if sparse else None

        def step(model=model, optimizer=optimizer, pruner=pruner) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            if pruner is None or pruner():
                optimizer.step()

        steps[kind] = step
        step()
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for turn in range(rounds):
        for kind in sorted(steps, reverse=bool(turn % 2)):
            seconds[kind].append(timed(steps[kind], time.process_time))
    pairs = zip(seconds["sparse"], seconds["dense"])
    return {
        "ratio": statistics.median(sparse / dense for sparse, dense in pairs),
        "ratio of the fastest": min(seconds["sparse"]) / min(seconds["dense"]),
        "CPU seconds": {kind: min(values) for kind, values in seconds.items()},
        "image_side": side,
        "batch_size": batch_size,
        "rounds": rounds,
    }


class Weights(nn.Module):
    """ResNet-50's weights without its activations: the gradient is a constant."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(64, 3, 7)]
        into = 64
        for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for block in range(blocks):
                shapes += [(width, into, 1), (width, width, 3), (4 * width, width, 1)]
                shapes += [(4 * width, into, 1)] if block == 0 else []
                into = 4 * width
        self.layers = nn.ModuleList(
            nn.Conv2d(i, o, k, bias=False) for o, i, k in shapes
        )
        self.layers.append(nn.Linear(2048, 1000, bias=False))
        self.directions = [torch.randn_like(layer.weight) for layer in self.layers]

    def loss(self) -> torch.Tensor:
        pairs = zip(self.layers, self.directions)
        return torch.stack([(layer.weight * d).sum() for layer, d in pairs]).sum()


def topology_updates(theirs: Any, rounds: int) -> dict[str, Any]:
    """Seconds of the call that changes the topology, of each implementation."""
    torch.manual_seed(0)
    model = Weights()
    models = {"rigl-torch": model, "rigl_xla": copy.deepcopy(model)}
    makers = {"rigl-torch": theirs, "rigl_xla": RigLScheduler}
    seconds: dict[str, list[float]] = {kind: [] for kind in models}
    pruners = {}
    for kind, built in models.items():
        optimizer = sgd(built)
        pruners[kind] = makers[kind](built, optimizer, delta=2, **OPTIONS), optimizer
    for _ in range(rounds):
        for kind, (pruner, optimizer) in pruners.items():
            for due in (False, True):
                optimizer.zero_grad()
                models[kind].loss().backward()
                if due:
                    seconds[kind].append(timed(pruner))
                elif pruner():
                    optimizer.step()
    best = {kind: min(values) for kind, values in seconds.items()}
    return {
        "times faster": best["rigl-torch"] / best["rigl_xla"],
        "seconds": best,
        "rounds": rounds,
    }


def rigl_torch(folder: str) -> Any:
    """rigl-torch's scheduler, from a folder that is not of the environment."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", folder, "rigl-torch==0.5.2"], check=True)
    sys.path.insert(0, folder)
    return importlib.import_module("rigl_torch.RigL").RigLScheduler


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    for name in ("torch", "torchvision"):
        found[name] = importlib.metadata.version(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--image-side", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--only-steps", action="store_true")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = {"date": datetime.date.today().isoformat(), "versions": versions()}
        if not arguments.only_steps:
            found = topology_updates(rigl_torch(folder), arguments.rounds)
            report["topology update"] = found
        report["ordinary step over dense"] = ordinary_steps(
            arguments.rounds, arguments.image_side, arguments.batch_size
        )
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
