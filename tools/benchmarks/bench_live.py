"""Measures what live members cost: without a failure, at a death, and where one joins.

Two live members, and two replicas that `launch` starts, train an MLP with AdamW, with
sums of floats and with exact ones; two of torchft's replicas train it with its DDP. All
ten run at once, but the pairs take turns of six updates, whose time and processor time
are compared. Then one member of three is killed, and another joins; sums are of floats.

    python tools/benchmarks/bench_live.py --output docs/benchmarks/bench_live.json
"""

from __future__ import annotations

import importlib.metadata
import json
import os
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
from tools.record import parser_with_output, row, save

HEARTBEAT_SECONDS = 1.0
# Widths, of 2 w^2 weights, three times; and the turns in a round.
WIDTHS = {"10 MB of state": (640, 16), "100 MB of state": (2048, 6)}
DEATH = "from a death to the next update"
JOINER = "of a joiner, from load() to its first update"
LOADING = "of a joiner, from load() to its first minibatch"
# Seconds; a death is detected by a heartbeat that fails to come.
GOALS = {
    "10 MB of state": {DEATH: HEARTBEAT_SECONDS + 0.25, JOINER: None, LOADING: None},
    "100 MB of state": {DEATH: None, JOINER: None, LOADING: 1.0},
}
STEP_GOALS = {
    "live over elastic": 1.03, "live over torchft": 1.03, "live exact over exact": 1.02,
}  # fmt: skip
BATCH = 256
TURN = 6  # updates
PAIRS = ("elastic", "exact", "live", "live exact", "torchft")

Times = list[list[float]]  # of turns: their seconds, and the processor's


class Turns:
    """Has one pair of processes wait while another one runs, by files in a folder.

    Args:
        folder: Where the turn of number n begins when ``turn-n`` is there.
        number: That of this pair's first turn, its place in `PAIRS`.
        num_updates: How many each pair makes.
    """

    def __init__(self, folder: Path, number: int, num_updates: int) -> None:
        self._folder, self._number = folder, number
        self._num_updates = num_updates
        self.seconds: list[float] = []  # of each turn, without its first update
        self.processor_seconds: list[float] = []

    def wait(self) -> None:
        """Waits until it is this pair's turn."""
        while not (self._folder / f"turn-{self._number}").exists():
            time.sleep(0.001)

    def __call__(self, update: vbs.Update) -> None:
        self.end(update.step)

    def end(self, step: int) -> None:
        """Ends an update; after the last one of a turn it waits for the next turn."""
        place = (step + 1) % TURN
        if place == 1:
            self._began = time.perf_counter(), time.process_time()
        if place == 0:
            now = time.perf_counter(), time.process_time()
            self.seconds.append(now[0] - self._began[0])
            self.processor_seconds.append(now[1] - self._began[1])
            (self._folder / f"turn-{self._number + 1}").touch()
            self._number += len(PAIRS)
            if step + 1 < self._num_updates:
                self.wait()


def build_model(width: int) -> nn.Module:
    """Returns the MLP, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def train_with_torchft(
    width: int, num_updates: int, folder: str, address: str
) -> list[list[float]]:
    """Trains the same by torchft; returns what `train` does."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    model = build_model(width)
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=lambda state: None, state_dict=dict,
        min_replica_size=2, rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, lighthouse_addr=address, hostname="127.0.0.1",
        replica_id=f"torchft-{os.getpid()}", init_sync=False,
    )  # fmt: skip
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))
    inputs, targets = torch.randn(BATCH, width), torch.arange(BATCH)
    turns = Turns(Path(folder).parent, PAIRS.index("torchft"), num_updates)
    turns.wait()
    for step in range(num_updates):
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), targets % 10).backward()
        optimizer.step()
        turns.end(step)
    manager.shutdown()
    return [turns.seconds, turns.processor_seconds]


def train(
    rank: int,
    width: int,
    num_updates: int,
    folder: str,
    times: str = "",
    pair: str = "live",
) -> list[list[float]]:
    """Trains one of a pair; returns the seconds of turns, and the processor's.

    With ``times`` it appends the clock's time to that file: before and after it has
    loaded, and after every update. Without them it waits for its pair's turns.
    """
    del rank
    torch.set_num_threads(1)
    model = build_model(width)
    sampler = vbs.CustomSampler(
        dataset_size=10**6, trace=[2 * BATCH], minibatch_size=BATCH, on_end="hold",
        verbose=False,
    )  # fmt: skip
    optimizer = vbs.LinearRuleOptimizer(
        torch.optim.AdamW(model.parameters()), sampler, ref_batchsize=BATCH,
        exact=model if "exact" in pair else None,
    )  # fmt: skip
    checkpointer = vbs.Checkpointer(
        folder, optimizer, model=model, every_updates=10**6, stop_on=()
    )

    def note() -> None:
        if times:
            with open(times, "a") as file:
                file.write(f"{time.time()}\n")

    turns = Turns(Path(folder).parent, PAIRS.index(pair), num_updates)
    note()
    checkpointer.load()
    note()
    optimizer.attach(lambda update: note())
    if not times:
        optimizer.attach(turns)
        turns.wait()
    optimizer.attach(checkpointer)
    optimizer.set_epoch(0)
    inputs, targets = torch.randn(BATCH, width), torch.arange(BATCH)
    for _ in sampler:
        F.cross_entropy(model(inputs), targets % 10).backward()
        optimizer.step()
        if checkpointer.num_updates == num_updates:
            break
    return [turns.seconds, turns.processor_seconds]


def start(code: str, **variables: str) -> subprocess.Popen[str]:
    """Starts a process that runs a line after its imports."""
    lines = f"import xla_replica\nfrom tools.benchmarks import bench_live\n{code}"
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


def costs(width: int, num_turns: int) -> dict[str, list[float]]:
    """Returns, by turn, what updates of live members take over those of others."""
    with tempfile.TemporaryDirectory() as name, xla_replica.lighthouse() as address:
        folder, num_updates = Path(name), TURN * num_turns
        told = {
            pair: (width, num_updates, str(folder / pair), "", pair) for pair in PAIRS
        }
        theirs = (width, num_updates, str(folder / "torchft"))
        launch = "xla_replica.launch(bench_live.train, {}, 2, 'cpu')[0]"
        # One lighthouse for each pair of members.
        with xla_replica.lighthouse() as second, xla_replica.lighthouse() as third:
            processes = [
                start(f"print({launch.format(told[pair])})")
                for pair in ("elastic", "exact")
            ]
            for pair, place in (("live", address), ("live exact", second)):
                members = [start_member(place, told[pair], min_members=2) for _ in "AB"]
                processes += members
            line = f"print(bench_live.train_with_torchft(*{theirs}, {third!r}))"
            processes += [start(line) for _ in "AB"]
            time.sleep(30)  # all have imported, and wait
            (folder / "turn-0").touch()
            said = [process.communicate()[0].splitlines()[-1] for process in processes]
    elastic, exact, live, _, live_exact, _, torchft, _ = map(json.loads, said)

    def ratios(mine: Times, others: Times, kind: int = 0) -> list[float]:
        return [one / other for one, other in zip(mine[kind], others[kind])]

    return {
        "live over elastic": ratios(live, elastic),
        "live over elastic, processor time": ratios(live, elastic, 1),
        "live over torchft": ratios(live, torchft),
        "live exact over exact": ratios(live_exact, exact),
        "live exact over live": ratios(live_exact, live),
        "elastic, ms": [1e3 * seconds / (TURN - 1) for seconds in elastic[0]],
    }


def changes(width: int) -> dict[str, float]:
    """Kills one of three members, and has another one join; returns seconds."""
    with tempfile.TemporaryDirectory() as folder, xla_replica.lighthouse() as address:

        def ticks(name: str) -> list[float]:
            path = Path(folder, name)
            return [float(t) for t in path.read_text().split()] if path.exists() else []

        def join(name: str) -> subprocess.Popen[str]:
            path = str(Path(folder, name))
            return start_member(address, (width, 10**6, folder, path))

        members = [join(name) for name in "ABC"]
        try:
            while min(len(ticks(name)) for name in "ABC") < 12:
                time.sleep(0.1)
            members[0].kill()
            killed_at = time.time()
            time.sleep(2.5 * HEARTBEAT_SECONDS)
            after_death = next(t for t in ticks("B") if t > killed_at + 0.3)
            members.append(join("D"))
            while len(ticks("D")) < 4:
                time.sleep(0.1)
            asked, loaded, first = ticks("D")[:3]
            return {
                DEATH: after_death - killed_at,
                JOINER: first - asked,
                LOADING: loaded - asked,
            }
        finally:
            for member in members:
                member.kill()
                member.communicate()


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    options = parser.parse_args()
    rows = []
    for name, (width, num_turns) in WIDTHS.items():
        steps = costs(width, num_turns * options.rounds)
        ends = [changes(width) for _ in range(options.rounds)]
        rows.append(row(f"elastic step: {name}", steps.pop("elastic, ms"), "ms"))
        for what, ratios in steps.items():
            goal = STEP_GOALS.get(what)
            rows.append(row(f"{what}: {name}", ratios, at_most=goal))
        for what, goal in GOALS[name].items():
            seconds = [end[what] for end in ends]
            rows.append(row(f"{what}: {name}", seconds, "s", at_most=goal))
    others = {"torchft": importlib.metadata.version("torchft")}
    save(options.output, {"others": others, "rows": rows})


if __name__ == "__main__":
    main()
