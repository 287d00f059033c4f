"""A run of live members whose number follows a simulated spot market."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import variable_batch_size as vbs
import xla_replica
from tools.record import ROOT
from tools.studies import language_model_ways as ways

HEARTBEAT_SECONDS = 5.0  # many processes share two cores
START = (
    "import sys; from tools.studies.live_market import member; member(*sys.argv[1:])"
)


def member(folder: str, number: str) -> None:
    """Trains as a member; writes who makes which update, and in the end the digest."""
    home = Path(folder)
    settings = json.loads((home / "settings.json").read_text())
    sizes = ways.Sizes(**settings["sizes"])

    def prepare(model: torch.nn.Module, optimizer: vbs.ElasticOptimizer) -> None:
        def show(update: vbs.Update) -> None:
            there = optimizer.replica.all_gather(torch.tensor([int(number)]))
            if optimizer.replica.is_primary:
                with (home / "members.jsonl").open("a") as file:
                    file.write(
                        f"{json.dumps([update.step, there.flatten().tolist()])}\n"
                    )

        optimizer.attach(show)
        controller = vbs.BatchSizeController(
            optimizer, least=sizes.minibatch, most=sizes.machines * sizes.minibatch,
            factor=1.01, policy=vbs.per_replica(sizes.minibatch),
            trace_file=home / "decided.csv",
        )  # fmt: skip
        optimizer.attach(controller)

    first = sizes.machines * sizes.minibatch  # held until something is decided
    trained = ways.train(
        "spot", settings["seed"], sizes, first, prepare, checkpoint=home / "checkpoints"
    )
    if xla_replica.current().is_primary:
        (home / "unfinished").write_text(ways.digest(trained))
        (home / "unfinished").rename(home / "digest")


def members_of(folder: Path) -> dict[int, list[int]]:
    """Returns the numbers of the members that have made each update."""
    path = folder / "members.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith("\n"))


def live_run(folder: Path, sizes: ways.Sizes, seed: int) -> dict[str, Any]:
    """Trains with members that are killed and started by the updates of a market.

    The oldest members are killed, but never the last one that has joined. One that ends
    by itself, since it was silent for too long, is replaced as well.

    Raises:
        RuntimeError: Many members have failed.
    """
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = {"sizes": dataclasses.asdict(sizes), "seed": seed}
    (folder / "settings.json").write_text(json.dumps(settings))
    devices = ways.market(sizes, seed)["devices"].tolist()
    processes: list[subprocess.Popen[bytes]] = []
    began, killed, failed = time.perf_counter(), 0, 0
    with (
        xla_replica.lighthouse(heartbeat_seconds=HEARTBEAT_SECONDS) as address,
        (folder / "members.log").open("wb") as log,
    ):
        environment = {**os.environ, "LIVE_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1",
                       "LIVE_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS)}  # fmt: skip
        start = functools.partial(
            subprocess.Popen, env=environment, cwd=ROOT, stdout=log, stderr=log
        )
        try:
            while not (folder / "digest").exists():
                members = members_of(folder)
                statuses = [each.poll() for each in processes]
                failed = len(statuses) - sum(map(statuses.count, (None, 0, -9)))
                if failed > sizes.machines:
                    raise RuntimeError(f"members fail: see {folder}/members.log")
                there = [n for n, status in enumerate(statuses) if status is None]
                joined = [
                    n for n in there if n in members.get(max(members, default=0), [])
                ]
                change = devices[max(members, default=-1) + 1] - len(there)
                for number in joined[: max(min(-change, len(joined) - 1), 0)]:
                    processes[number].kill()
                    processes[number].wait()
                    killed += 1
                for number in range(len(processes), len(processes) + change):
                    command = [sys.executable, "-c", START, folder, str(number)]
                    processes.append(start(command))
                time.sleep(0.05)
        finally:
            for each in processes:
                each.kill()
                each.wait()
    trace = vbs.Trace(folder / "decided.csv")
    plan = vbs.Schedule(trace, sizes.samples, sizes.minibatch, "hold").plan(0, 1)
    return {
        "digest": (folder / "digest").read_text(),
        "batch_sizes": plan.batch_sizes.tolist(),
        "members": [len(there) for there in members_of(folder).values()],
        "killed": killed,
        "failed": failed,
        "added": len(processes) - devices[0],
        "seconds": time.perf_counter() - began,
    }
