"""Measures what live members cost: without a failure, at a death, and where one joins.

Two processes train a model with AdamW: by DistributedDataParallel, by the elastic
wrapper that `launch` starts, as live members, with sums of floats and with exact ones,
and by torchft's replicas with its DDP. All twelve run at once, but the pairs take turns
of six updates, whose time is compared. Models are a GPT of 5 million parameters on
4 x 128 tokens, a CNN on 128 images, an MLP of eight layers of 1024 on 128 rows. Where
the state has 10 or 100 MB, one member of three is killed too, and another joins; and
the time for which a member waits for its part of a state is compared with a plain send
of as many bytes over the same sockets.

    python tools/benchmarks/bench_live.py --output live.json
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica
from tools.benchmarks.bench_ddp import cnn, mlp
from tools.benchmarks.models import GPT
from tools.record import parser_with_output, row, save

HEARTBEAT_SECONDS = 1.0
DEATH = "from a death to the next update"
JOINER = "of a joiner, from load() to its first update"
LOADING = "of a joiner, from load() to its first minibatch"
WAITING = "of the others, longer than an update, where one joins"
PART = "a part of a state over a plain send of as many bytes"


def wide(width: int) -> nn.Module:
    """Returns two square layers: 24 w^2 bytes with AdamW's state."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


# By name: the model, and a minibatch of its inputs.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "gpt": (
        lambda: GPT(256, 5, 2000, 128), lambda: torch.randint(0, 2000, (4, 128)),
    ),
    "cnn": (lambda: cnn(64), lambda: torch.randn(128, 256)),
    "mlp": (lambda: mlp(8, 1024), lambda: torch.randn(128, 1024)),
    "10MB": (lambda: wide(640), lambda: torch.randn(256, 640)),
    "100MB": (lambda: wide(2048), lambda: torch.randn(256, 2048)),
}  # fmt: skip
STATES = "10MB", "100MB"
# Seconds; a death is detected by a heartbeat that fails to come.
GOALS = {
    STATES[0]: {
        DEATH: HEARTBEAT_SECONDS + 0.25,
        JOINER: None,
        LOADING: None,
        WAITING: None,
    },
    STATES[1]: {DEATH: None, JOINER: None, LOADING: 1.0, WAITING: None},
}
# The pair that is measured, the one that it is compared with, and the goal.
RATIOS = (
    ("live", "ddp", 1.03), ("live", "elastic", 1.03), ("live", "torchft", 1.03),
    ("live exact", "exact", 1.02), ("live exact", "live", None),
)  # fmt: skip
# Of elastic replicas with exact sums over DDP.
EXACT_GOALS = {"gpt": 1.05, "cnn": 1.15, "mlp": 1.40}
TURN = 6  # updates
PAIRS = ("ddp", "elastic", "exact", "live", "live exact", "torchft")

Times = list[float]  # the seconds of turns


class Turns:
    """Has one pair of processes wait while another one runs, by files in a folder.

    Args:
        folder: Where the turn of number n begins when ``turn-n`` is there.
        number: That of this pair's first turn, its place in `PAIRS`.
        num_updates: How many each pair makes.
        num_pairs: How many take turns.
    """

    def __init__(
        self, folder: Path, number: int, num_updates: int, num_pairs: int = len(PAIRS)
    ) -> None:
        self._folder, self._number = folder, number
        self._num_updates, self._num_pairs = num_updates, num_pairs
        self.seconds: Times = []  # of each turn, without its first update
        (folder / f"ready-{os.getpid()}").touch()
        self.wait()

    def wait(self) -> None:
        """Waits until it is this pair's turn."""
        while not (self._folder / f"turn-{self._number}").exists():
            time.sleep(0.005)

    def __call__(self, update: vbs.Update) -> None:
        self.end(update.step)

    def end(self, step: int) -> None:
        """Ends an update; after the last one of a turn it waits for the next turn."""
        place = (step + 1) % TURN
        if place == 1:
            self._began = time.perf_counter()
        if place == 0:
            self.seconds.append(time.perf_counter() - self._began)
            (self._folder / f"turn-{self._number + 1}").touch()
            self._number += self._num_pairs
            if step + 1 < self._num_updates:
                self.wait()


class Loop:
    """A model, the same in every process, and the loss of its minibatch.

    Args:
        name: That of the model.
        shard: Shards it, if there is a function.
    """

    def __init__(
        self, name: str, shard: Callable[[nn.Module], None] | None = None
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        build, draw = MODELS[name]
        self.model, self._inputs = build(), draw()
        if shard is not None:
            shard(self.model)
        self.inner = torch.optim.AdamW(self.model.parameters())

    def backward(self, model: nn.Module) -> None:
        outputs = model(self._inputs).flatten(0, -2)
        F.cross_entropy(outputs, torch.arange(len(outputs)) % 10).backward()


def train_by_hand(
    model: nn.Module, optimizer: Any, loop: Loop, substeps: int, num_updates: int,
    turns: Any,
) -> None:  # fmt: skip
    """Trains with a module that sums gradients in the last minibatch of a step.

    Or in all of them, without a method ``no_sync``.
    """
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)
    for step in range(num_updates):
        optimizer.zero_grad()
        for substep in range(substeps):
            last = substep == substeps - 1
            with contextlib.nullcontext() if last else no_sync():
                loop.backward(model)
        optimizer.step()
        turns.end(step)


def train_with_ddp(
    rank: int, name: str, substeps: int, num_updates: int, folder: str
) -> Times:
    """Trains by torch's DDP; returns what `train` does."""
    del rank
    loop = Loop(name)
    model = DistributedDataParallel(loop.model, gradient_as_bucket_view=True)
    turns = Turns(Path(folder).parent, PAIRS.index("ddp"), num_updates)
    train_by_hand(model, loop.inner, loop, substeps, num_updates, turns)
    return turns.seconds


def train_with_torchft(
    name: str, substeps: int, num_updates: int, folder: str, address: str
) -> Times:
    """Trains by torchft; returns what `train` does."""
    import torchft

    loop = Loop(name)
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(), load_state_dict=lambda state: None,
        state_dict=dict, min_replica_size=2, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=address,
        hostname="127.0.0.1", replica_id=f"torchft-{os.getpid()}", init_sync=False,
    )  # fmt: skip
    model = torchft.DistributedDataParallel(manager, loop.model)
    optimizer = torchft.Optimizer(manager, loop.inner)
    turns = Turns(Path(folder).parent, PAIRS.index("torchft"), num_updates)
    train_by_hand(model, optimizer, loop, substeps, num_updates, turns)
    manager.shutdown()
    return turns.seconds


def train(
    rank: int,
    name: str,
    substeps: int,
    num_updates: int,
    folder: str,
    times: str = "",
    pair: str = "live",
) -> Times:
    """Trains one of a pair; returns the seconds of its turns.

    With ``times`` it appends the clock's time to that file: before and after it has
    loaded, and after every update. Without them it waits for its pair's turns.
    """
    del rank
    loop = Loop(name)
    sampler = vbs.CustomSampler(
        dataset_size=10**6, trace=[2 * substeps], minibatch_size=1, on_end="hold",
        verbose=False,
    )  # fmt: skip
    optimizer = vbs.ConstantOptimizer(
        loop.inner, sampler, exact=loop.model if "exact" in pair else None
    )
    checkpointer = vbs.Checkpointer(
        folder, optimizer, model=loop.model, every_updates=10**6, stop_on=()
    )

    def note() -> None:
        if times:
            with open(times, "a") as file:
                file.write(f"{time.time()}\n")

    note()
    checkpointer.load()
    note()
    optimizer.attach(lambda update: note())
    seconds: Times = []
    if not times:
        turns = Turns(Path(folder).parent, PAIRS.index(pair), num_updates)
        optimizer.attach(turns)
        seconds = turns.seconds
    optimizer.attach(checkpointer)
    optimizer.set_epoch(0)
    for _ in sampler:
        loop.backward(loop.model)
        optimizer.step()
        if checkpointer.num_updates == num_updates:
            break
    return seconds


def start(
    code: str, script: str = "bench_live", **variables: str
) -> subprocess.Popen[str]:
    """Starts a process that runs a line after it has imported a benchmark."""
    lines = f"import xla_replica\nfrom tools.benchmarks import {script}\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", lines],
        env={**os.environ, **variables},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )


def start_member(
    address: str, arguments: tuple[object, ...], min_members: int = 1
) -> subprocess.Popen[str]:
    """Starts a process that trains as a member, and prints what `train` returns."""
    return start(
        f"print(bench_live.train(0, *{arguments}))",
        LIVE_LIGHTHOUSE=address,
        LIVE_HEARTBEAT_SECONDS=str(HEARTBEAT_SECONDS),
        LIVE_MIN_MEMBERS=str(min_members),
    )


def costs(name: str, substeps: int, num_turns: int) -> dict[str, Times]:
    """Returns the milliseconds of an update, by pair and turn."""
    num_updates = TURN * num_turns
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        told = {pair: (name, substeps, num_updates, str(root / pair)) for pair in PAIRS}
        launch = "print(xla_replica.launch(bench_live.{}, {}, 2, 'cpu')[0])"
        processes = {"ddp": start(launch.format("train_with_ddp", told["ddp"]))}
        for pair in ("elastic", "exact"):
            processes[pair] = start(launch.format("train", (*told[pair], "", pair)))
        for pair in ("live", "live exact", "torchft"):
            # One lighthouse for each pair of members.
            address = stack.enter_context(xla_replica.lighthouse())
            if pair == "torchft":
                theirs = f"bench_live.train_with_torchft(*{told[pair]}, {address!r})"
                both = [start(f"print({theirs})") for _ in "AB"]
            else:
                own = (*told[pair], "", pair)
                both = [start_member(address, own, min_members=2) for _ in "AB"]
            processes[pair] = both[0]
        while len(list(root.glob("ready-*"))) < 2 * len(PAIRS):
            time.sleep(0.1)
        (root / "turn-0").touch()
        said = {pair: one.communicate()[0] for pair, one in processes.items()}
    seconds = {pair: json.loads(text.splitlines()[-1]) for pair, text in said.items()}
    return {
        pair: [1e3 * turn / (TURN - 1) for turn in turns]
        for pair, turns in seconds.items()
    }


def changes(name: str) -> dict[str, float]:
    """Kills one of three members, and has another one join; returns seconds."""
    with tempfile.TemporaryDirectory() as folder, xla_replica.lighthouse() as address:

        def ticks(member: str) -> list[float]:
            path = Path(folder, member)
            return [float(t) for t in path.read_text().split()] if path.exists() else []

        def join(member: str) -> subprocess.Popen[str]:
            path = str(Path(folder, member))
            return start_member(address, (name, 1, 10**6, folder, path))

        members = [join(each) for each in "ABC"]
        try:
            while min(len(ticks(each)) for each in "ABC") < 12:
                time.sleep(0.1)
            members[0].kill()
            killed_at = time.time()
            time.sleep(2.5 * HEARTBEAT_SECONDS)
            after_death = next(t for t in ticks("B") if t > killed_at + 0.3)
            members.append(join("D"))
            while len(ticks("D")) < 4:
                time.sleep(0.1)
            asked, loaded, first = ticks("D")[:3]
            gaps = [
                (end, end - begin)
                for member in "BC"
                for begin, end in itertools.pairwise(ticks(member)[2:])
            ]
            usual = statistics.median(gap for end, gap in gaps if end < killed_at)
            longest = max(gap for end, gap in gaps if end > asked)
            return {
                DEATH: after_death - killed_at,
                JOINER: first - asked,
                LOADING: loaded - asked,
                WAITING: longest - usual,
            }
        finally:
            for member in members:
                member.kill()
                member.communicate()


def send_parts(num_rounds: int) -> list[Times]:
    """Sends parts of 100 MB to the youngest member, as a state and as plain bytes.

    Returns the seconds of both in every round, of this member.
    """
    torch.set_num_threads(1)
    replica: Any = xla_replica.current()
    number = len(replica.change(()).members)
    state = {"tensors": [torch.ones(2048, 2048) for _ in range(6)]}
    plain, last = torch.ones(25 * 2**20 // (number - 1)), number - 1
    found = []
    for _ in range(num_rounds):
        replica.barrier()
        began = time.perf_counter()
        own = state if replica.member < last else None
        replica.share(None, own, 0, [last])
        shared = time.perf_counter() - began
        replica.barrier()
        began, group = time.perf_counter(), replica._group
        if replica.member < last:
            group.send([plain], last, 0).wait()
        else:
            into = [torch.empty_like(plain) for _ in range(last)]
            for work in [group.recv([t], n, 0) for n, t in enumerate(into)]:
                work.wait()
        found.append([shared, time.perf_counter() - began])
    replica.barrier()
    return found if replica.member < last else []


def part_ratios(num_senders: int, num_rounds: int) -> Times:
    """Returns how long senders wait in `share`, over sending plain bytes."""
    with xla_replica.lighthouse() as address:
        told = {"LIVE_LIGHTHOUSE": address, "LIVE_MIN_MEMBERS": str(num_senders + 1)}
        code = f"print(bench_live.send_parts({num_rounds}))"
        processes = [start(code, **told) for _ in range(num_senders + 1)]
        said = [one.communicate()[0].splitlines()[-1] for one in processes]
    pairs = [json.loads(text) for text in said]
    return [own / plain for of_one in pairs for own, plain in of_one[1:]]


def add_cases(
    parser: argparse.ArgumentParser, models: Iterable[str], counts: Sequence[int]
) -> None:
    """Adds the options that choose models, and minibatches of a step."""
    names = list(models)
    parser.add_argument(
        "--models", nargs="+", choices=names, default=names, help="default: all"
    )
    parser.add_argument(
        "--substeps", type=int, nargs="+", default=counts,
        help=f"minibatches of a step on each replica (default: {counts})",
    )  # fmt: skip


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    add_cases(parser, MODELS, [1, 2])
    options = parser.parse_args()
    rows = []
    cases = [(name, count) for name in options.models for count in options.substeps]
    for name, substeps in tqdm(cases, desc="steps", disable=None):
        steps = costs(name, substeps, 4 * options.rounds)
        of = f"{name}, {substeps} a step"
        rows.append(row(f"elastic step: {of}", steps["elastic"], "ms"))
        for pair, other, goal in (*RATIOS, ("exact", "ddp", EXACT_GOALS.get(name))):
            ratios = [mine / its for mine, its in zip(steps[pair], steps[other])]
            rows.append(row(f"{pair} over {other}: {of}", ratios, at_most=goal))
    for name in tqdm([n for n in STATES if n in options.models], desc="deaths"):
        ends = [changes(name) for _ in range(options.rounds)]
        for what, goal in GOALS[name].items():
            seconds = [end[what] for end in ends]
            rows.append(row(f"{what}: {name}", seconds, "s", at_most=goal))
    if STATES[1] in options.models:
        for number in tqdm([1, 2, 3], desc="parts", disable=None):
            ratios = part_ratios(number, 4 * options.rounds + 1)
            rows.append(row(f"{PART}: {number} senders", ratios, at_most=1.3))
    others = {"torchft": importlib.metadata.version("torchft")}
    save(options.output, {"others": others, "rows": rows})


if __name__ == "__main__":
    main()
