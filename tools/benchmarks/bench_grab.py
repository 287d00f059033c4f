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
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import grab_xla
import xla_replica
from tools.record import save
from tools.references import grab_sampler

STEPS = 2  # per epoch: with more, grab-sampler on XLA takes hours


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        error = grab_sampler.install(Path(folder))
        if error is not None:
            sys.exit(f"grab-sampler {grab_sampler.VERSION} is not available: {error}")
        (cells,) = xla_replica.launch(measure, (args, folder), 1, args.device)
    print_table(cells)
    if args.output is not None:
        save(
            args.output,
            {
                "device": args.device,
                "threads": torch.get_num_threads(),
                "grab-sampler": grab_sampler.VERSION,
                "unit": "microseconds per sample",
                "cells": cells,
            },
        )


def measure(rank: int, args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Returns every cell of the table, measured on this replica's device."""
    del rank
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


def print_table(cells: list[dict[str, Any]]) -> None:
    """Prints microseconds per sample, one row for each cell."""
    names = ("type", "d", "batch", "grab-sampler", "grab_xla", "ratio")
    print("{:>10} {:>8} {:>6} {:>13} {:>9} {:>6}".format(*names))
    for cell in cells:
        print(
            f"{cell['type']:>10} {cell['d']:>8} {cell['batch']:>6} "
            f"{cell['grab_sampler']:>13.1f} {cell['grab_xla']:>9.1f} "
            f"{cell['ratio']:>6.1f}"
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cpu", choices=xla_replica.DEVICES, help="where to balance"
    )
    parser.add_argument(
        "--types", nargs="+", default=["mean", "pair"], help="balance types"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[10**4, 10**5, 10**6])
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--epochs", type=int, default=5, help="epochs that count")
    parser.add_argument("--output", type=Path, help="JSON to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
