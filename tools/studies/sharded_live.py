"""Compares the weights of sharded live runs of many shapes that are killed and joined.

A shape is members x processes of each, among which FSDP2 shards a GPT of 5 million
parameters (`sharded_training.py`). A run begins in one shape, and after half of its
updates stops and continues its checkpoint in the next one. In either half one process
of a member is killed, or all are, which the command `run` replaces, and others join by
the line that it prints. Every update must be of its samples, and the weights those of a
run of one process that nobody disturbs: with exact sums by their hash, in float64 but
for rounding. With --quick it takes a minute or two, else half an hour of two cores:

    python tools/studies/sharded_live.py exact \\
        --output docs/benchmarks/sharded_live-exact.json
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

from support.scripts import descendants, words
from support.xla_replica.live_job import LiveJob

import variable_batch_size as vbs
from tools.record import parser_with_output, save
from tools.studies.live_runs import TOLERANCE, differences, relative_error
from tools.studies.sharded_training import MINIBATCH, NUM_SAMPLES, TRACE

SCRIPT = Path(__file__).with_name("sharded_training.py")
HEARTBEAT_SECONDS = 5.0  # many processes share two cores
TIMEOUT_SECONDS = 180.0  # within which each has run a minibatch
MOST_SECONDS = 900.0  # until members have started and made an update
LOOK_SECONDS = 0.05
SHAPES = "1x1", "1x2", "2x1", "2x2", "3x1", "1x4"
EPOCHS = {"exact": 6, "float": 17}  # of six or seven updates
HALF = {"kill": 3, "join": 2}  # what befalls a run in either half
QUICK_SHAPES, QUICK_EPOCHS, QUICK_HALF = ("1x2", "2x1"), 4, {"kill": 1, "join": 1}

Pids = tuple[int, ...]


class Shape(NamedTuple):
    """How many members there are, and how many processes each has."""

    members: int
    processes: int

    def __str__(self) -> str:
        return f"{self.members}x{self.processes}"


def shape_of(text: str) -> Shape:
    members, processes = text.split("x")
    return Shape(int(members), int(processes))


class DisturbedRun:
    """A run of one shape that continues in another one, and what befalls it.

    Args:
        folder: A new one.
        arguments: Those of the script after its folder.
        seed: Of who is killed, when, and in which order members join.

    Attributes:
        job: Reads the folder.
        done: How often each disturbance has happened.
        problems: What went wrong, in words.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], seed: int) -> None:
        self.job = LiveJob(folder, arguments, {})
        self._command = words([SCRIPT, folder, *arguments])
        self._draw = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []
        self._log = folder / "run.txt"
        self._shape = Shape(0, 0)
        self._processes: list[subprocess.Popen[bytes]] = []  # run's, and joiners'
        self._killed: set[int] = set()  # the processes of members that were
        self._gone: list[Any] = []  # joiners that were
        self._allowed, self._allowed_at, self._update_seconds = 0, 0.0, 0.0

    def __call__(
        self, shapes: Sequence[Shape], half: dict[str, int], num_updates: int
    ) -> None:
        """Runs it to its end; what hangs is a problem."""
        gate, spacing = 2, num_updates // (2 * sum(half.values()) + 2)
        try:
            for self._shape in shapes:
                self._start()
                names = [*Counter(half).elements()]
                for name in self._draw.sample(names, len(names)):
                    self._advance(gate)
                    getattr(self, f"_{name}")()
                    gate += spacing
                self._advance(gate)
                if self._shape is shapes[0]:
                    self._send(signal.SIGTERM, sum(self._members("ready"), ()))
                else:
                    self._allow(num_updates + 1)
                self._wait(lambda: all(p.poll() is not None for p in self._processes))
                self._look_at_ends(0 if self._shape is shapes[-1] else 143)
        except TimeoutError as error:
            self.problems.append(str(error))
        finally:
            self._send(signal.SIGKILL, sum(self._members("built"), ()))
            for process in self._processes:
                process.kill()
                process.wait()

    # --- what is there --------------------------------------------------------------

    def _members(self, what: str) -> list[Pids]:
        """Returns the processes of each member that lives and has done that."""
        names = [path.stem.split("-") for path in self.job.folder.glob(f"*.{what}")]
        found = [tuple(map(int, name)) for name in sorted(names)]
        return [m for m in found if all(Path(f"/proc/{pid}").exists() for pid in m)]

    def _have_all(self, what: str) -> bool:
        """Returns whether all members have done that which are to be there."""
        _, *joiners = (process.poll() for process in self._processes)
        found = self._members(what)
        is_number = len(found) == self._shape.members + joiners.count(None)
        return is_number and self._killed.isdisjoint(sum(found, ()))

    def _made(self) -> int:
        """Returns how many updates are made, as far as any member has told."""
        told = (int(path.read_text()) for path in self.job.folder.glob("*.made"))
        return max(told, default=0)

    def _wait(self, until: Callable[[], bool]) -> None:
        give_up = time.monotonic() + MOST_SECONDS
        while not until():
            if time.monotonic() > give_up:
                raise TimeoutError(
                    f"as {self._shape} it hangs after {self._made()} updates, with "
                    f"{self._members('ready')}: {self._log.read_text()[-3000:]}"
                )
            time.sleep(LOOK_SECONDS)

    def _look_at_ends(self, expected: int) -> None:
        """Notes whether somebody has ended whom nobody has killed."""
        run, *joiners = self._processes
        if run.returncode != expected:
            self.problems.append(f"run has ended with {run.returncode}")
        text = self._log.read_text()
        for pid, status in re.findall(r"member (\d+) has died \((-?\d+)\)", text):
            if int(pid) not in self._killed:
                self.problems.append(f"{pid}, healthy, has died ({status}): {text}")
        for joiner in joiners:
            if joiner.returncode and expected == 0 and joiner not in self._gone:
                self.problems.append(f"a joiner, healthy, has died: {text}")

    # --- what is done ---------------------------------------------------------------

    def _allow(self, number: int) -> None:
        """Lets the run make so many updates."""
        self._allowed, self._allowed_at = number, time.monotonic()
        (self.job.folder / "new").write_text(str(number))
        (self.job.folder / "new").rename(self.job.folder / "allowed")

    def _advance(self, number: int) -> None:
        """Waits for so many updates, and for all members, for whom no update waits.

        They are made one by one while nobody is about to join.
        """

        def is_there() -> bool:
            made = self._made()
            if made >= self._allowed and self._have_all("built"):
                self._update_seconds = time.monotonic() - self._allowed_at
                self._allow(made + 1)
            return made >= number and self._have_all("ready")

        self._wait(is_there)

    def _popen(self, command: list[str]) -> None:
        folder = Path(sys.executable).parent  # of torchrun
        environment = {
            **os.environ, "PATH": f"{folder}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1", "LIVE_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS),
        }  # fmt: skip
        with self._log.open("ab") as log:
            started = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self._processes.append(started)

    def _start(self) -> None:
        """Starts the members of a shape."""
        self._processes, numbers = [], self._shape._asdict().items()
        options = [word for name, value in numbers for word in (f"--{name}", value)]
        seconds = "--heartbeat-seconds", HEARTBEAT_SECONDS
        module = sys.executable, "-m", "xla_replica.members", *seconds
        self._popen(words([*module, "run", *options, *self._command]))

    def _join(self) -> None:
        self.done["joins"] += 1
        *_, line = re.findall("another member: (.*)", self._log.read_text())
        self._popen(["sh", "-c", line])

    def _kill(self) -> None:
        """Kills one process or all of a member, in the midst of an update, mostly."""
        victims = self._draw.choice(self._members("ready"))
        is_whole = self._draw.random() < 0.5
        self.done["kills of members" if is_whole else "kills of processes"] += 1
        self._killed.update(victims)
        for joiner in self._processes[1:]:
            if {joiner.pid, *descendants(joiner.pid)}.intersection(victims):
                self._gone.append(joiner)
        self._allow(self._made() + 1)
        time.sleep(self._draw.uniform(0, self._update_seconds))
        pids = victims if is_whole else self._draw.sample(victims, 1)
        self._send(signal.SIGKILL, pids)

    def _send(self, number: int, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def alone(folder: Path, arguments: Sequence[str]) -> LiveJob:
    """Returns a run of one process that nobody disturbs."""
    job = LiveJob(folder, arguments, {})
    command = words([sys.executable, SCRIPT, folder, *arguments])
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return job


def outcome(run: DisturbedRun, undisturbed: LiveJob, is_float: bool) -> dict[str, Any]:
    """Returns what has become of a run, and its problems beside one in peace."""
    problems, results = [*run.problems], run.job.results()
    [expected] = undisturbed.results()
    hashes = sorted({each["hash"] for each in results})
    if any(each["updates"] != expected["updates"] for each in results) or not results:
        problems.append(f"members end with {results}")
    error = None
    if is_float and results:
        paths = (each.folder / "values" for each in (run.job, undisturbed))
        error = max(map(relative_error, *map(torch.load, paths)))
        if error > TOLERANCE or len(hashes) != 1:
            problems.append(f"weights differ by {error:.1e}, members end with {hashes}")
    elif hashes != [expected["hash"]]:
        problems.append(f"{hashes}, undisturbed {expected['hash']}")
    num_wrong: Any = "?"
    try:
        num_wrong = differences(run.job, undisturbed)
        if num_wrong:
            problems.append(f"{num_wrong} samples are lost or doubled")
    except AssertionError as failure:
        problems.append(f"an update is not of its samples: {failure}")
    return {
        **run.done, "hash": " ".join(hashes), "error": error,
        "updates": expected["updates"], "samples lost or doubled": num_wrong,
        "problems": problems,
    }  # fmt: skip


def main() -> None:
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    help = "exact: products in bfloat16 and exact sums; float: all of it in float64"
    add("kind", choices=EPOCHS, help=help)
    help = f"members x processes of each (default: {' '.join(SHAPES)})"
    add("--shapes", nargs="+", type=shape_of, metavar="MxP", help=help)
    add("--seed", type=int, default=0, help="of the first run (default: %(default)s)")
    add("--quick", action="store_true", help="a tiny model, few updates, two shapes")
    add("--keep", action="store_true", help="keep the folder of the runs")
    options = parser.parse_args()
    is_float = options.kind == "float"
    num_epochs = QUICK_EPOCHS if options.quick else EPOCHS[options.kind]
    arguments = ["--epochs", str(num_epochs), *["--float"] * is_float]
    arguments += ["--quick"] * options.quick
    plan = vbs.Schedule(vbs.Trace(TRACE), NUM_SAMPLES, MINIBATCH, "cycle")
    num_updates = plan.steps(num_epochs - 1).stop
    default = map(shape_of, QUICK_SHAPES if options.quick else SHAPES)
    shapes = options.shapes or [*default]
    folder = Path(tempfile.mkdtemp(prefix="sharded-"))
    print(f"in {folder}", flush=True)
    whole = alone(folder / "whole", [*arguments, "--whole"])
    undisturbed = whole if is_float else alone(folder / "alone", arguments)
    lines: list[dict[str, Any]] = []
    result = {
        "kind": options.kind, "quick": options.quick, "seed": options.seed,
        "one process": undisturbed.results()[0]["hash"], "runs": lines,
    }  # fmt: skip
    if not is_float:
        result["one process, by autocast"] = whole.results()[0]["hash"]
    for number, pair in enumerate(zip(shapes, [*shapes[1:], shapes[0]])):
        began, path = time.monotonic(), folder / "-".join(map(str, pair))
        run = DisturbedRun(path, arguments, options.seed + number)
        run(pair, QUICK_HALF if options.quick else HALF, num_updates)
        found = outcome(run, undisturbed, is_float)
        seconds = round(time.monotonic() - began)
        lines.append({"shapes": [*map(str, pair)], **found, "seconds": seconds})
        print(lines[-1], flush=True)
        save(options.output, result)
    print(f"one process: {result['one process']}", *table(lines), sep="\n")
    if any(line["problems"] for line in lines):
        sys.exit(f"see {folder}")
    if not options.keep:
        shutil.rmtree(folder)


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the rows of a table of Markdown."""
    heads = (
        "shape, and the next", "one process killed", "a member killed", "joined",
        "updates", "samples lost or doubled", "weights",
    )  # fmt: skip
    rows = [heads, ["---"] * len(heads)]
    for line in lines:
        counts = [
            line.get(f"{what}", 0)
            for what in ("kills of processes", "kills of members", "joins", "updates")
        ]
        error = line["error"]
        end = line["hash"] if error is None else f"{error:.1e}"
        wrong = line["samples lost or doubled"]
        rows.append([", ".join(line["shapes"]), *counts, wrong, end])
    return [f"| {' | '.join(words(row))} |" for row in rows]


if __name__ == "__main__":
    main()
