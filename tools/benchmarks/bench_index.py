"""Measures what an index of a pool costs beside scoring it, and the memory of a search.

    python tools/benchmarks/bench_index.py
    python tools/benchmarks/bench_index.py --search --output result.json

`index_pool` and `score_pool(score="grad_norm")` run in turn over the same samples, each
into a new folder, in one process on one thread; the median of the ratios of their
processor times is reported, also for an index in memory, which writes nothing. Beside
them are the page faults of a sample: the projections of an index in memory are new
memory, 4 faults for 16 KiB, unless the process has memory to use again. The models are
those of bench_per_sample.py.

--search indexes 100 000 samples with 4096 numbers each (1.6 GB, in a temporary folder),
and searches it for 1000 queries in a new process, whose largest resident memory (VmHWM
of Linux, with Python, torch and mapped files) is reported.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg
from tools.benchmarks.models import CLASSES, MODELS
from tools.record import parser_with_output, row, save

GOAL = 1.25
POOL, QUERIES, SIZE = 100_000, 1000, 4096


def cost(function: Callable[[str], Any]) -> tuple[float, int]:
    """Returns the processor seconds and page faults of a call with a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin = time.process_time()
        function(folder)
        seconds = time.process_time() - begin
        return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def most_resident() -> float:
    """Returns the most MiB that this process has had in memory, and no other's.

    The ru_maxrss of getrusage begins with that of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def measure(name: str, count: int, size: int, rounds: int) -> dict[str, Any]:
    """Returns the ratio of the times of indexing and scoring, and both per sample."""
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model = build()
    pool = TensorDataset(draw(count), torch.randint(0, CLASSES, (count,)))

    def scored(folder: str | None) -> Any:
        return psg.score_pool(model, pool, folder=folder, progress=False)

    def indexed(folder: str | None) -> Any:
        return psg.index_pool(model, pool, size=size, folder=folder, progress=False)

    kept = indexed(None).size
    scored(None)
    found: dict[str, list[float]] = {"score": [], "index": [], "index in memory": []}
    faults: dict[str, list[int]] = {way: [] for way in found}
    for turn in range(rounds):
        ways: list[tuple[str, Callable[[str], Any]]] = [
            ("score", scored),
            ("index", indexed),
            ("index in memory", lambda folder: indexed(None)),
        ]
        for way, function in ways if turn % 2 else reversed(ways):
            seconds, faulted = cost(function)
            found[way].append(seconds)
            faults[way].append(faulted)
    per_sample = {
        f"{way}: microseconds per sample": 1e6 * statistics.median(times) / count
        for way, times in found.items()
    }
    for way, each in faults.items():
        per_sample[f"{way}: page faults per sample"] = statistics.median(each) / count
    rounds = {
        way: [a / b for a, b in zip(found[way], found["score"])]
        for way in ("index", "index in memory")
    }
    ratios = {way: statistics.median(each) for way, each in rounds.items()}
    return {"numbers": kept, **ratios, **per_sample, "rounds": rounds["index"]}


class Drawn(Dataset):
    """Vectors of 64 numbers and classes, drawn from their indices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        generator = np.random.default_rng(index)
        return generator.normal(size=64).astype(np.float32), index % CLASSES


def searched(folder: str) -> None:
    """Searches the index in a folder, and prints seconds and memory as JSON."""
    index = psg.open_index(folder, verify=False)
    before = most_resident()
    queries = index[np.linspace(0, len(index) - 1, QUERIES).astype(int)]
    begin = time.process_time()
    found = index.search(queries, top=10, by="cosine")
    seconds = time.process_time() - begin
    expected = np.linspace(0, len(index) - 1, QUERIES).astype(int)
    row = {
        "samples": len(index),
        "size": index.size,
        "queries": len(queries),
        "processor seconds": seconds,
        "MiB at the beginning": before,
        "MiB at most": most_resident(),
        "queries that find themselves": int((found.indices[:, 0] == expected).sum()),
    }
    print(json.dumps(row))


def search() -> dict[str, Any]:
    """Returns what a search of a large index takes in a process of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, CLASSES))
    with tempfile.TemporaryDirectory() as folder:
        options = {"size": SIZE, "block_size": 256, "folder": folder}
        psg.index_pool(model, Drawn(POOL), **options)
        begin = time.process_time()
        psg.open_index(folder)
        checked = time.process_time() - begin
        command = [sys.executable, __file__, "--search-in", folder]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {**json.loads(run.stdout), "processor seconds of checking it": checked}


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["mlp", "cnn", "transformer"],
        help="default: mlp cnn transformer",
    )
    parser.add_argument(
        "--count", type=int, default=2048, help="samples of the pool (default 2048)"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1024, 4096],
        help="most numbers of a projection (default 1024 4096)",
    )
    parser.add_argument(
        "--rounds", type=int, default=12, help="how often all are timed (default 12)"
    )
    parser.add_argument(
        "--search", action="store_true", help="search a large index, too (1.6 GB)"
    )
    parser.add_argument(
        "--search-in", metavar="FOLDER", help="what --search calls in a new process"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.search_in:
        searched(options.search_in)
        return
    result: dict[str, Any] = {
        "goal": GOAL,
        "samples": options.count,
        "models": {},
        "rows": [],
    }
    for name in options.models:
        for size in options.sizes:
            found = measure(name, options.count, size, options.rounds)
            ratios = found.pop("rounds")
            result["models"][f"{name}, {size}"] = found
            work = f"an index of {size} numbers over norms: {name}"
            result["rows"].append(row(work, ratios, at_most=GOAL))
    if options.search:
        result["search"] = search()
    save(options.output, result)


if __name__ == "__main__":
    main()
