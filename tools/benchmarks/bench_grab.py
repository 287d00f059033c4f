"""Measures what a balance step costs, beside grab-sampler's on the same gradients.

Both samplers get the same gradients, new ones in every epoch, and take turns; the first
two epochs are not counted. A step is one batch. Its time includes waiting for the
device and all compilations. The result is the mean over steps in microseconds per
sample (on a CPU the median, since a mean would measure what else the machine does). The
ratio says how many times faster grab_xla is. grab-sampler 0.1.3 is fetched from PyPI
into a temporary folder.

    python tools/benchmarks/bench_grab.py                # on this CPU
    python tools/benchmarks/bench_grab.py --device xla   # XLA:CPU, or a TPU
    python tools/benchmarks/bench_grab.py --device cuda --output grab-cuda.json

With ``--memory`` it measures instead the most memory that a step takes on this CPU
beyond what was held before, the gradients included, as torch's profiler counts it. The
gradients are those of 32 samples and a multilayer perceptron with 1.3 million
parameters.

    python tools/benchmarks/bench_grab.py --memory

With ``--training`` it measures what an ordered epoch costs beside a plain one: the
processor time of a step whose backward pass balances, too, over that of an ordinary
step, on one thread, at each fidelity, and the most memory that either takes beyond what
was held before. "exact, from samples" makes ``.grad`` from the gradients of samples,
which the exact step forms beside it. "by hand" is the step that forms every sample's
gradient first and gives them to the sampler; "vmap, grab-sampler" is that with
torch.func and grab-sampler. "capture" is a step that records and balances nothing, and
"projection" one that also projects; "plain again" is the ordinary step of another
model. Each is timed between two ordinary steps, over which its time is taken; the
result is the median over rounds (``--epochs``). The models are those of
bench_per_sample.py and a softmax regression with 650 parameters.

    python tools/benchmarks/bench_grab.py --training
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import grab_xla
import per_sample_grad as psg
import xla_replica
from tools.benchmarks.models import MODELS, losses_of
from tools.peak_memory import peak_memory
from tools.record import parser_with_output, row, save
from tools.references import grab_sampler
from tools.side_by_side import keep_freed_pages, side_by_side

STEPS = 2  # per epoch: with more, grab-sampler on XLA takes hours
# What memory is measured of: widths of the layers, samples in a step, and samplers.
WIDTHS, BATCH = (784, 1024, 512, 10), 32
SAMPLERS: list[tuple[str, dict[str, Any]]] = [
    ("mean", {}),
    ("mean", {"normalize_grads": True}),
    ("mean", {"random_projection": "kron"}),
    ("pair", {}),
    ("recursive", {"depth": 5}),
    ("recursive-pair", {"batch_size": BATCH}),
    ("sign", {}),
    ("batch", {"batch_size": BATCH}),
    ("adamean", {}),
    ("norm", {}),
]
# What an epoch's cost is measured of: models with their batch sizes, and balance types.
SMALL = (lambda: nn.Linear(64, 10), lambda batch: torch.randn(batch, 64))
TRAINED_MODELS = {
    "softmax regression": (*SMALL, (32,)),
    "mlp": (*MODELS["mlp"], (32,)),
    "cnn": (*MODELS["cnn"], (32, 64)),
    "transformer": (*MODELS["transformer"], (32, 64)),
}
# An ordinary step, and another one beside it, whose ratio says how exact ratios are.
PLAIN = ("plain", "plain again")
TRAINED_TYPES: dict[str, Callable[[int], dict[str, Any]]] = {
    "mean": lambda batch: {},
    "pair": lambda batch: {},
    "recursive": lambda batch: {"depth": 5},
    "recursive-pair": lambda batch: {"batch_size": batch},
}


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        error = grab_sampler.install(Path(folder))
        if error is not None:
            sys.exit(f"grab-sampler {grab_sampler.VERSION} is not available: {error}")
        if args.memory:
            cells, unit = measure_memory(Path(folder)), "MiB"
        elif args.training:
            cells = measure_training(Path(folder), args.models, args.epochs)
            unit = "time and memory, times an ordinary step's"
        else:
            (cells,) = xla_replica.launch(measure, (args, folder), 1, args.device)
            unit = "microseconds per sample"
    rows = [
        row("grab-sampler over grab_xla: {type}, {d:,} numbers, batch {batch}".format(
            **cell), cell["ratio"], at_least=1.0)
        for cell in cells if "ratio" in cell
    ]  # fmt: skip
    found = {"device": args.device, "threads": torch.get_num_threads(), "unit": unit}
    found |= {"others": {"grab-sampler": grab_sampler.VERSION}, "rows": rows}
    save(args.output, found | {"cells": cells})


def measure_memory(folder: Path) -> list[dict[str, Any]]:
    """Returns, and prints, the peak of a step of every sampler in MiB."""
    shapes = {f"{i}.bias": (width,) for i, width in enumerate(WIDTHS[1:])}
    shapes |= {f"{i}.weight": pair for i, pair in enumerate(zip(WIDTHS[1:], WIDTHS))}
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    grads = {name: torch.randn(BATCH, *shape) for name, shape in shapes.items()}
    given = sum(value.nbytes for value in grads.values()) / 2**20
    print(f"gradients: {given:.0f} MiB")
    cells = []
    with grab_sampler.imported(folder) as package:
        for balance_type, options in SAMPLERS:
            given_to = (range(2 * BATCH), parameters, balance_type, "cpu")
            samplers = {"grab-sampler": package.GraBSampler(*given_to, **options)}
            fidelity = "projected" if "random_projection" in options else "exact"
            mine = grab_xla.GraBSampler(*given_to, fidelity=fidelity, **options)
            samplers["grab_xla"] = mine
            peaks = {way: peak_of_step(each, grads) for way, each in samplers.items()}
            cells.append({"type": balance_type, "options": options, **peaks})
            print(balance_type, options, {way: f"{x:.0f}" for way, x in peaks.items()})
    return cells


def measure_training(
    folder: Path, names: list[str], rounds: int
) -> list[dict[str, Any]]:
    """Returns, and prints, how many times a plain step each model's steps take."""
    torch.set_num_threads(1)
    if not keep_freed_pages():
        print("no glibc whose malloc keeps pages: times differ from run to run")
    cells = []
    with grab_sampler.imported(folder) as package:
        for name in names:
            build, draw, batches = TRAINED_MODELS[name]
            for batch in batches:
                steps = steps_of(build, draw, batch, rounds, package)
                found = ratios_to_plain(steps, rounds, f"{name}, batch {batch}")
                for way, (time_ratio, memory_ratio) in found.items():
                    print(
                        f"{way:<38} {time_ratio:8.2f} x, {memory_ratio:6.2f} x memory"
                    )
                cells.append({"model": name, "batch": batch, **found})
    return cells


def steps_of(
    build: Callable[[], nn.Module],
    draw: Callable[[int], torch.Tensor],
    batch: int,
    rounds: int,
    package: Any,
) -> dict[str, Callable[[], None]]:
    """Returns the training step of every way, each of its own model."""
    x, y = draw(batch), torch.randint(0, 10, (batch,))
    samples = range(batch * 2 * (rounds + 4))  # no epoch ends within a measurement
    ways: dict[str, tuple[Backward, dict[str, Any]]] = {
        "by hand": (by_hand, {"fidelity": "exact"}),
        "exact": (recorded, {"fidelity": "exact"}),
        "exact, from samples": (
            functools.partial(recorded, from_samples=True), {"fidelity": "exact"}
        ),
        "projected": (recorded, {"fidelity": "projected"}),
        "projected to 1024": (
            recorded, {"fidelity": "projected", "projection_size": 1024}
        ),
        "group": (recorded, {"fidelity": "group", "group_size": batch}),
    }  # fmt: skip
    steps = {way: training_step(build(), x, y, plain, None) for way in PLAIN}
    steps["capture"] = training_step(build(), x, y, captured, None)
    model = build()
    projection = psg.Projection(dict(model.named_parameters()), 4096)
    project = functools.partial(projected, projection=projection)
    steps["projection"] = training_step(model, x, y, project, None)
    for balance_type, options_of in TRAINED_TYPES.items():
        for way, (backward, extra) in ways.items():
            if way == "group" and balance_type == "recursive-pair":
                continue  # its blocks are those of several rows in a step
            model, options = build(), options_of(batch) | extra
            parameters = dict(model.named_parameters())
            sampler = grab_xla.GraBSampler(samples, parameters, balance_type, **options)
            step = training_step(model, x, y, backward, sampler)
            steps[f"{balance_type}, {way}"] = step
        model = build()
        if sum(p.numel() for p in model.parameters()) < 10**6:
            parameters = dict(model.named_parameters())
            sampler = package.GraBSampler(
                samples, parameters, balance_type, "cpu", **options_of(batch)
            )
            step = training_step(model, x, y, vectorised, sampler)
            steps[f"{balance_type}, vmap, grab-sampler"] = step
    return steps


def ratios_to_plain(
    steps: dict[str, Callable[[], None]], rounds: int, title: str
) -> dict[str, tuple[float, float]]:
    """Returns time and memory of every step but the plain one, over that one's."""
    # Of two steps the first finds another's cache.
    pairs = {way: functools.partial(_twice, step) for way, step in steps.items()}
    plain, twice_plain = steps.pop("plain"), pairs.pop("plain")
    found, least = side_by_side(twice_plain, pairs, rounds, title), peak_memory(plain)
    return {
        way: (found.ratios[way], peak_memory(step) / least)
        for way, step in steps.items()
    }


def _twice(step: Callable[[], None]) -> None:
    step()
    step()


# Runs a forward and a backward pass, and gives the sampler what it balances.
Backward = Callable[[nn.Module, torch.Tensor, torch.Tensor, Any], None]


def training_step(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, backward: Backward, sampler: Any
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if isinstance(sampler, Iterable):
        list(sampler)  # begins an epoch

    def step() -> None:
        optimizer.zero_grad()
        backward(model, x, y, sampler)
        optimizer.step()

    return step


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor, sampler: None) -> None:
    losses_of(model, x, y).mean().backward()


def captured(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    sampler: None,
) -> None:
    with psg.capture(model) as recorded:
        losses = losses_of(model, x, y)
    recorded.stream(losses, lambda factors: {}, accumulate="mean")


def projected(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    sampler: None,
    projection: psg.Projection,
) -> None:
    with psg.capture(model) as recorded:
        losses = losses_of(model, x, y)
    recorded.project(losses, projection, accumulate="mean")


def recorded(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    sampler: grab_xla.GraBSampler,
    from_samples: bool = False,
) -> None:
    with sampler.record(model):
        losses = losses_of(model, x, y)
    sampler.backward(losses, from_samples=from_samples)


def by_hand(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, sampler: grab_xla.GraBSampler
) -> None:
    balance(model, psg.per_sample_grads(model, losses_of, (x, y)), sampler)


def vectorised(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, sampler: Any
) -> None:
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        given = functional_call(model, values, (x.unsqueeze(0),))
        return F.cross_entropy(given, y.unsqueeze(0))

    balance(model, vmap(grad(loss), (None, 0, 0))(parameters, x, y), sampler)


def balance(model: nn.Module, grads: dict[str, torch.Tensor], sampler: Any) -> None:
    sampler.step(grads)
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name].mean(0)


def peak_of_step(sampler: Any, grads: dict[str, torch.Tensor]) -> float:
    list(sampler)
    sampler.step(grads)  # compiles the loop
    return peak_memory(lambda: sampler.step(grads)) / 2**20


def measure(rank: int, args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Returns every cell of the table, measured on this replica's device."""
    del rank
    torch.set_num_threads(1)
    cells = [
        {"type": balance_type, "d": d, "batch": batch}
        for balance_type in args.types
        for d in args.sizes
        for batch in args.batches
    ]
    with grab_sampler.imported(Path(folder)) as package:
        for cell in tqdm(cells, "cells", disable=None):
            cell.update(measure_cell(package, cell, args.epochs))
    return cells


def measure_cell(package: Any, cell: dict[str, Any], epochs: int) -> dict[str, float]:
    """Returns microseconds per sample of both samplers, and their ratio."""
    replica = xla_replica.current()
    batch, d = cell["batch"], cell["d"]
    n = STEPS * batch
    parameters = {"w": torch.zeros(d)}
    options = {"random_first_epoch": False}
    samplers = {
        "grab_sampler": package.GraBSampler(
            range(n), parameters, cell["type"], replica.device, **options
        ),
        "grab_xla": grab_xla.GraBSampler(range(n), parameters, cell["type"], **options),
    }
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for epoch in range(2 + epochs):
        for sampler in samplers.values():
            list(sampler)
        for _ in range(STEPS):
            rows = torch.randn(batch, d, generator=generator)
            grads = {"w": replica.send(rows)}
            for name, sampler in samplers.items():
                replica.wait()
                started = time.perf_counter()
                sampler.step(grads)
                replica.sync()
                replica.wait()
                if epoch >= 2:
                    times[name].append(time.perf_counter() - started)
    average = statistics.mean if replica.is_lazy else statistics.median
    found = {name: average(values) / batch * 1e6 for name, values in times.items()}
    return {**found, "ratio": found["grab_sampler"] / found["grab_xla"]}


def parse_args() -> argparse.Namespace:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--device", default="cpu", choices=xla_replica.DEVICES, help="where to balance"
    )
    parser.add_argument(
        "--types",
        nargs="+",
        default=["mean", "pair"],
        help="balance types (default: mean pair)",
    )
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[10**4, 10**5, 10**6],
        help="numbers of a gradient (default: 10^4 10^5 10^6)",
    )  # fmt: skip
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[16, 64],
        help="samples of a step (default: 16 64)",
    )  # fmt: skip
    parser.add_argument(
        "--models", nargs="+", choices=TRAINED_MODELS, default=[*TRAINED_MODELS],
        help="what --training trains (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--epochs", type=int, default=5, help="epochs that count (default: 5)"
    )
    parser.add_argument(
        "--memory", action="store_true", help="measure memory instead of time"
    )
    parser.add_argument(
        "--training", action="store_true", help="measure what an ordered step costs"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
