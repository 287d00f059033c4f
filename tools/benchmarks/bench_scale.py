"""Measures how costs grow: with parameters, samples and the length of a trace.

1. An update alone, of one replica on a CPU: `step()` of the elastic wrapper beside what
   a loop by hand does there (a learning rate, a division, the update, zeros).
2. GraB's next order, and the size of a sampler's state, by the number of samples.
3. The first epoch of a trace, by its length.

    python tools/benchmarks/bench_scale.py --output docs/benchmarks/bench_scale.json
"""

from __future__ import annotations

import io
import itertools
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
from grab_xla import GraBSampler
from tools.benchmarks.bench_exact import elastic
from tools.benchmarks.bench_step import LR, make_model
from tools.record import parser_with_output, row, save

MINIBATCH = 32
# Of the network of variable_train_mnist.py on 8 x 8 pixels.
WIDTHS = (1, 2, 4, 8)
GOAL_MICROSECONDS = 400.0  # of the update of the smallest one
SAMPLES = (10**3, 10**4, 10**5, 10**6)
TRACE_STEPS = (10**3, 10**4, 10**5, 10**6, 10**7)


def with_gradients(width: int) -> tuple[nn.Module, torch.optim.SGD]:
    """Returns a model and its optimizer, equal whenever it is called."""
    torch.manual_seed(0)
    model = make_model(8, width)
    return model, torch.optim.SGD(model.parameters(), LR, momentum=0.9)


def backward(model: nn.Module) -> None:
    """Computes gradients, which cost less than those of a loss."""
    torch.stack([p.sum() for p in model.parameters()]).sum().backward()


def elastic_update(width: int) -> Callable[[], float]:
    """Returns a function that makes an update, and returns the microseconds of it."""
    model, inner = with_gradients(width)
    optimizer, minibatches = elastic(inner, MINIBATCH, 1)

    def update() -> float:
        next(minibatches)
        backward(model)
        return microseconds(optimizer.step)

    return update


def update_by_hand(width: int) -> Callable[[], float]:
    """Returns the same, written without the wrapper and its checks."""
    model, inner = with_gradients(width)
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad.div_(1)
        inner.param_groups[0]["lr"] = LR
        inner.step()
        inner.zero_grad()

    def update() -> float:
        backward(model)
        return microseconds(step)

    return update


def microseconds(run: Callable[[], Any]) -> float:
    """Returns how long a call takes."""
    began = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - began)


def updates(rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns microseconds of both updates by the number of parameters, and rows."""
    sizes, curves, rows = [], {"elastic": [], "by hand": []}, []
    for width in tqdm(WIDTHS, "updates", disable=None):
        sizes.append(sum(p.numel() for p in make_model(8, width).parameters()))
        ways = {"elastic": elastic_update(width), "by hand": update_by_hand(width)}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(-20, rounds):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                taken = ways[name]()
                if number >= 0:
                    found[name].append(taken)
        for name, values in found.items():
            curves[name].append(statistics.median(values))
            goal = GOAL_MICROSECONDS if (name, width) == ("elastic", 1) else None
            work = f"update alone on a CPU, {name}: {sizes[-1]:,} parameters"
            rows.append(row(work, values, "µs", at_most=goal))
    return curve("parameters", sizes, "microseconds of an update", curves), rows


def orders() -> list[dict[str, Any]]:
    """Returns the cost of GraB's next order, and bytes of states, by samples."""
    times, sizes = [], []
    for n in tqdm(SAMPLES, "orders", disable=None):
        weight = torch.zeros(4)
        sampler = GraBSampler(range(n), {"w": weight}, "mean", seed=0)
        rows = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
        order = iter(sampler)
        for _ in range(0, n, len(rows)):
            list(itertools.islice(order, len(rows)))
            sampler.step({"w": rows})
        list(order)
        times.append(1e-3 * microseconds(lambda sampler=sampler: next(iter(sampler))))
        buffer = io.BytesIO()
        torch.save(sampler.state_dict(), buffer)
        sizes.append(len(buffer.getvalue()))
    return [
        curve("samples", SAMPLES, "milliseconds to GraB's next order", {"": times}),
        curve("samples", SAMPLES, "bytes of GraB's state", {"": sizes}),
    ]


def traces() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns milliseconds to the first epoch by the trace's length, and rows."""
    times, rows = [], []
    for n in tqdm(TRACE_STEPS, "traces", disable=None):
        sizes = np.resize([1024, 2048, 4096, 512], n)
        tracemalloc.start()
        schedule_of(sizes)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        times.append(1e-3 * microseconds(lambda sizes=sizes: schedule_of(sizes)))
        rows.append(row(f"memory of a trace of {n:,} steps", peak / n, "bytes a step"))
    y = {"": times}
    return curve("steps of the trace", TRACE_STEPS, "milliseconds to epoch 0", y), rows


def schedule_of(sizes: np.ndarray) -> vbs.Schedule:
    """Returns the schedule of a trace whose first epoch has been planned."""
    schedule = vbs.Schedule(vbs.Trace(sizes), 1_281_167, MINIBATCH)
    schedule.plan(0, 8)
    return schedule


def curve(x_label: str, x: Any, y_label: str, y: dict[str, Any]) -> dict[str, Any]:
    """Returns what the report draws in a panel, and prints it."""
    print(f"{y_label} by {x_label} {list(x)}:")
    for name, values in y.items():
        print(f"    {name} {[round(value, 2) for value in values]}")
    return {"x label": x_label, "x": list(x), "y label": y_label, "y": y}


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=300, help="updates of each (default: 300)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    of_updates, rows = updates(args.rounds)
    of_traces, more = traces()
    curves = [of_updates, *orders(), of_traces]
    save(args.output, {"curves": curves, "rows": rows + more})


if __name__ == "__main__":
    main()
