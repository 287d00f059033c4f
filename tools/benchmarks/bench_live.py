"""Measures what live members cost: without a failure, at a death, and where one joins.

Two processes on this machine train an MLP with AdamW. Steps of live members and of
replicas that `launch` starts, both with exact sums, are timed in turn. Then one member
of three is killed, and another one joins.

    python tools/benchmarks/bench_live.py --output docs/benchmarks/bench_live.json
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica
from tools.record import parser_with_output, save

HEARTBEAT_SECONDS = 1.0
WIDTHS = {"10 MB of state": 640, "100 MB of state": 2048}  # 2 w^2 weights, three times
BATCH = 256


def train(
    rank: int, width: int, num_updates: int, folder: str, times: str = ""
) -> float:
    """Trains; returns the median seconds of an update.

    With ``times`` it appends the clock's time to that file: before and after it has
    loaded, and after every update.
    """
    del rank
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    sampler = vbs.CustomSampler(
        dataset_size=100_000, trace=[2 * BATCH], minibatch_size=BATCH, on_end="hold",
        verbose=False,
    )  # fmt: skip
    optimizer = vbs.LinearRuleOptimizer(
        torch.optim.AdamW(model.parameters()), sampler, ref_batchsize=BATCH, exact=model
    )
    checkpointer = vbs.Checkpointer(
        folder, optimizer, model=model, every_updates=10**6, stop_on=()
    )

    def note() -> None:
        ticks.append(time.perf_counter())
        if times:
            with open(times, "a") as file:
                file.write(f"{time.time()}\n")

    ticks: list[float] = []
    note()
    checkpointer.load()
    note()
    optimizer.attach(lambda update: note())
    optimizer.attach(checkpointer)
    optimizer.set_epoch(0)
    inputs, targets = torch.randn(BATCH, width), torch.arange(BATCH)
    for _ in itertools.islice(sampler, num_updates):
        F.cross_entropy(model(inputs), targets % 10).backward()
        optimizer.step()
    gaps = [b - a for a, b in itertools.pairwise(ticks[5:])]
    return statistics.median(gaps)


def start_member(
    address: str, folder: str, name: str, *arguments: int, min_members: int = 1
) -> subprocess.Popen[str]:
    """Starts a process that trains as a member, and prints what `train` returns."""
    told = {
        "LIVE_LIGHTHOUSE": address,
        "LIVE_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS),
        "LIVE_MIN_MEMBERS": str(min_members),
    }
    width, num_updates = arguments
    code = (
        "from tools.benchmarks.bench_live import train\n"
        f"print(train(0, {width}, {num_updates}, {folder!r}, {folder!r} + '/{name}'))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **told},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )


def live_step(width: int, num_updates: int) -> float:
    """Returns the median seconds of an update of two live members."""
    with tempfile.TemporaryDirectory() as folder, xla_replica.lighthouse() as address:
        members = [
            start_member(address, folder, name, width, num_updates, min_members=2)
            for name in "AB"
        ]
        printed = [member.communicate()[0] for member in members]
        return float(printed[0].split()[-1])


def exact_step(width: int, num_updates: int) -> float:
    """Returns the same of two replicas that `launch` has started."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (width, num_updates, folder)
        return xla_replica.launch(train, arguments, num_replicas=2, device="cpu")[0]


def changes(width: int) -> dict[str, float]:
    """Kills one of three members, and has another one join; returns seconds."""
    with tempfile.TemporaryDirectory() as folder, xla_replica.lighthouse() as address:

        def ticks(name: str) -> list[float]:
            path = Path(folder, name)
            return [float(t) for t in path.read_text().split()] if path.exists() else []

        members = [start_member(address, folder, name, width, 10**6) for name in "ABC"]
        try:
            while min(len(ticks(name)) for name in "ABC") < 12:
                time.sleep(0.1)
            members[0].kill()
            killed_at = time.time()
            time.sleep(2.5 * HEARTBEAT_SECONDS)
            after_death = next(t for t in ticks("B") if t > killed_at + 0.3)
            members.append(start_member(address, folder, "D", width, 10**6))
            while len(ticks("D")) < 4:
                time.sleep(0.1)
            asked, loaded, first = ticks("D")[:3]
            return {
                "from a death to the next update": after_death - killed_at,
                "of a joiner, from load() to its first update": first - asked,
                "of these in load()": loaded - asked,
            }
        finally:
            for member in members:
                member.kill()
                member.communicate()


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name, width in WIDTHS.items():
        ratios, seconds = [], []
        for _ in range(options.rounds):
            exact, live = exact_step(width, 60), live_step(width, 60)
            ratios.append(live / exact)
            seconds.append(exact)
        ends = [changes(width) for _ in range(options.rounds)]
        found[name] = {
            "live over exact": round(statistics.median(ratios), 3),
            "exact, ms": round(1e3 * statistics.median(seconds), 1),
            "heartbeat, s": HEARTBEAT_SECONDS,
            **{
                f"{what}, s": round(statistics.median(end[what] for end in ends), 2)
                for what in ends[0]
            },
        }
        print(name, found[name], flush=True)
    save(options.output, found)


if __name__ == "__main__":
    main()
