"""Measures what checkpoints cost, side by side with runs without them.

1. A step with a `Checkpointer` attached, between saves, against one without, on the
   same model and replicas, in alternating rounds of one run: a ratio.
2. Saving and loading, for models of several sizes: seconds and bytes.
3. Taking and comparing a sampler's state, for data sets and traces of several lengths.

    python tools/benchmarks/bench_checkpoint.py --output checkpoint.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica
from tools.benchmarks import bench_step
from tools.record import parser_with_output, row, save

MINIBATCH = bench_step.MINIBATCH
NEVER = 10**9


class Job:
    """One replica's training, with or without a checkpointer."""

    def __init__(
        self,
        folder: str | Path | None,
        args: argparse.Namespace,
    ) -> None:
        num_replicas = xla_replica.current().num_replicas
        trace = [2 * num_replicas * MINIBATCH]
        setup = bench_step.Setup(trace, args.steps, args.side, args.width)
        self.replica, self.setup = setup.replica, setup
        self.optimizer = vbs.LinearRuleOptimizer(
            setup.inner, setup.sampler, ref_batchsize=128
        )
        self.checkpointer = None
        if folder is not None:
            self.checkpointer = vbs.Checkpointer(
                folder,
                self.optimizer,
                every_updates=NEVER,
                model=setup.model,
            )
            self.optimizer.attach(self.checkpointer)

    def epoch(self, epoch: int) -> None:
        self.setup.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)
        for _ in self.setup.sampler:
            self.setup.backward()
            self.optimizer.step()


def compare_replica(
    rank: int, folder: str, args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns seconds per step of both jobs, in turns, and of a save and a load."""
    jobs = {"without": Job(None, args), "with": Job(folder, args)}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for epoch in range(args.rounds + 2):
        # Each goes first every other round: the second one finds warmer caches.
        for name, job in list(jobs.items())[:: 1 if epoch % 2 else -1]:
            elapsed = bench_step.timed(job.replica, job.epoch, epoch)
            if epoch >= 2:  # the first two compile
                seconds[name].append(elapsed / args.steps)
    checkpointer, replica = jobs["with"].checkpointer, jobs["with"].replica
    assert checkpointer is not None
    checkpointer.save()  # the first one is read back, and compiles
    path = checkpointer.save()
    size = path.stat().st_size if path else 0  # now: a later save may replace it
    costs = {
        "seconds_to_save": fastest(replica, checkpointer.save, 3),
        "seconds_to_load": fastest(replica, checkpointer.load, 3),
        "megabytes": size / 1e6,
    }
    return seconds, costs


def fastest(replica: xla_replica.Replica, act: Callable[[], Any], times: int) -> float:
    """Returns the seconds of the fastest of ``times`` calls."""
    return min(
        bench_step.timed(replica, lambda _: act(), number) for number in range(times)
    )


def ratio(mine: list[float], other: list[float]) -> dict[str, Any]:
    """Returns the ratios within all rounds, their median and quartiles."""
    ratios = [one / base for one, base in zip(mine, other)]
    low, _, high = statistics.quantiles(ratios, n=4)
    median = statistics.median(ratios)
    return {"ratio": median, "ratios": ratios, "ratio_quartiles": [low, high]}


def compare(num_replicas: int, width: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the cost of a step, a save and a load for a network of this width."""
    options = argparse.Namespace(**{**vars(args), "width": width})
    with tempfile.TemporaryDirectory() as folder:
        seconds, costs = xla_replica.launch(
            compare_replica, (folder, options), num_replicas, args.device
        )[0]
    return {
        "replicas": num_replicas,
        "width": width,
        **ratio(seconds["with"], seconds["without"]),
        "milliseconds_per_step": 1e3 * statistics.median(seconds["without"]),
        **costs,
    }


def state_cost(num_samples: int, num_steps: int) -> dict[str, float]:
    """Returns the microseconds to take a sampler's state and to check it."""
    sampler = vbs.CustomSampler(
        dataset_size=num_samples,
        trace=np.resize([1024, 2048, 512], num_steps),
        minibatch_size=MINIBATCH,
        on_end="cycle",
        verbose=False,
    )
    start = time.perf_counter()
    state = sampler.state_dict()  # hashes the trace
    first = time.perf_counter() - start
    times = []
    for _ in range(200):
        start = time.perf_counter()
        sampler.check_state(sampler.state_dict(), allow_changes=False)
        times.append(time.perf_counter() - start)
    assert state == sampler.state_dict()
    return {
        "samples": num_samples,
        "trace_steps": num_steps,
        "first_microseconds": 1e6 * first,
        "microseconds": 1e6 * statistics.median(times),
    }


def main() -> None:
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    add("--num-replicas", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    add("--widths", type=int, nargs="+", default=[1, 4],
        help="of the network (default: 1 4)")  # fmt: skip
    add("--steps", type=int, default=20, help="of a round (default: 20)")
    add("--rounds", type=int, default=30, help="default: 30")
    add("--side", type=int, default=8, help="of an image, in pixels (default: 8)")
    add("--device", choices=xla_replica.DEVICES, help="see xla_replica.launch")
    args = parser.parse_args()
    result: dict[str, Any] = {"steps": [], "states": [], "rows": []}
    cases = itertools.product(args.num_replicas, args.widths)
    for num_replicas, width in tqdm(list(cases), disable=None):
        of = f"replicas: {num_replicas}, width {width}"
        cost = compare(num_replicas, width, args)
        result["steps"].append(cost)
        ratios = cost.pop("ratios")
        result["rows"].append(row(f"a step between saves: {of}", ratios, at_most=1.02))
    for num_samples, num_steps in itertools.product(
        (10**4, 10**6, 10**9), (10, 10**4, 10**6)
    ):
        cost = state_cost(num_samples, num_steps)
        result["states"].append(cost)
        work = f"a state: {num_samples:,} samples, {num_steps:,} steps"
        result["rows"].append(row(work, cost["microseconds"], "µs"))
    save(args.output, result)


if __name__ == "__main__":
    main()
