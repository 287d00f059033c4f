"""Torments a run for a while, and compares it with one of one replica left in peace.

    python tools/studies/abuse.py live [--whole] [--log FILE]
    python tools/studies/abuse.py live --seconds 3600 \\
        --output docs/benchmarks/abuse-live.json

A "live" run has members that come and go. The first command disturbs many short ones,
see `live_runs.py`; the second one disturbs one for long. An "emulated" one has XLA
replicas that are threads of one process; when that has died, another one continues its
checkpoint with another number of them. At first all of a run may die; then one process
is spared, so that it is seen whether it grows.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

from support.scripts import descendants
from support.variable_batch_size.member import MINIBATCH
from support.xla_replica.live_job import Lighthouse, LiveJob, Weather

import variable_batch_size as vbs
from tools.record import parser_with_output, save
from tools.studies import live_runs
from tools.studies.live_runs import differences

HEARTBEAT_SECONDS = 1.0
EARLY = 0.3  # the part of the time, at least, in which nobody is spared
PAUSE = {"live": 1.5, "emulated": 3.0}  # seconds between disturbances
MOST_MEMBERS, MOST_REPLICAS, MOST_MINIBATCHES = 4, 4, 8
MARGIN = 25  # updates until all have read which one is the last
ROOM = 4096  # bytes of a file on the full disk
HARMLESS = (signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, signal.SIGCHLD)

# Exit statuses that follow from what was done to a process.
STATUSES = {
    "killed": {-signal.SIGKILL}, "left": {143, -signal.SIGTERM}, "full disk": {1},
}  # fmt: skip
# And what else one may say that ends with an error.
CAUSES = ("Superseded", "No space left", "there is no lighthouse", "cannot be reached")

# How much a process may grow: a share, and numbers.
SIGNS = {"memory, kB": 0.1, "threads": 8, "files": 8, "sockets": 12}
LONG = 0.2  # the part of the time for which it must have lived


def signs(pid: int) -> tuple[int, ...]:
    """Returns the kilobytes, threads, files and sockets of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory, threads = map(int, re.findall(r"(?:VmRSS|Threads):\s+(\d+)", status))
    opened = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = sum(name.startswith("socket:") for name in opened)
    return memory, threads, len(opened) - sockets, sockets


def growth(seen: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """Returns for how long a process has lived, and medians of its signs.

    Args:
        seen: Times, each with the signs then. The second and the last quarter count.
    """
    quarter = len(seen) // 4
    parts = seen[quarter : 2 * quarter], seen[-quarter:]
    medians = [[statistics.median(sign) for sign in zip(*part)][1:] for part in parts]
    pairs = {name: list(pair) for name, *pair in zip(SIGNS, *medians)}
    return {"seconds": round(seen[-1][0] - seen[0][0]), **pairs}


class Torment:
    """Disturbs the processes of a job at random, and watches them.

    Attributes:
        done: How often each disturbance was met.
        num_started, num_kills: How many processes were started, and killed.
        ends: How they have ended.
        light: Keeps the lighthouse there.
    """

    def __init__(self, job: LiveJob, kind: str, seconds: float, seed: int) -> None:
        self._job, self._is_live, self._seconds = job, kind == "live", seconds
        self._pause, self._random = PAUSE[kind], random.Random(seed)
        self.done: Counter[str] = Counter()
        self.num_started = self.num_kills = 0
        self.ends: list[str] = []
        self.light, self._lighthouse = contextlib.ExitStack(), None
        self._wanted, self._may_start = 1, True
        self._is_early, self._spared = True, None
        self._harms: dict[int, set[str]] = defaultdict(set)  # by process
        self._later: list[tuple[float, Callable[[], Any]]] = []
        # What was seen of processes that live, and of those that have ended.
        self._seen: dict[int, list[tuple[float, ...]]] = {}
        self._lives: list[list[tuple[float, ...]]] = []
        self._look_seconds, self._looked = max(0.25, seconds / 3600), 0.0

    def shine(self, lighthouse: Lighthouse) -> None:
        """Has members meet at a lighthouse, which may be away for a while."""
        self._lighthouse, self._wanted = lighthouse, 3
        self.light.enter_context(lighthouse)
        self._may_start = True

    def __call__(self, bar: tqdm) -> None:
        """Disturbs the job until the time is up."""
        self._job.wait(lambda: self._look() or (self._ready() and self._job.saved()))
        age = late = 0.0
        began, next_at, deck = time.monotonic(), self._pause / 2, self._deal()
        while age < self._seconds + late:
            self._look()
            age = time.monotonic() - began
            bar.update(min(age, self._seconds) - bar.n)
            over = age - EARLY * self._seconds
            self._is_early = over < 0 or self.done.total() < 2
            if self._is_early:
                late = max(0.0, over)
            if not self._ready():
                next_at = max(next_at, age + self._pause)
            if age > next_at:
                name = next(deck)
                is_done = getattr(self, f"_{name}")()
                if is_done or is_done is None:
                    self.done[name.replace("_", " ")] += 1
                    bar.set_postfix(met=self.done.total(), kills=self.num_kills)
                    next_at = age + self._pause * self._random.uniform(0.5, 1.5)

    def end(self, seconds: float) -> int:
        """Ends the run in peace; returns how many updates it has made."""
        while self._later:
            self._look()
        number = self._job.saved()[0].num_updates + MARGIN
        self._job.tell("end", number)

        def is_over() -> bool:
            self._wanted = 0 if self._job.results() else 1
            self._look()
            return bool(self._job.results()) and not self._job.running

        self._job.wait(is_over, seconds)
        return number

    def growth(self) -> list[dict[str, Any]]:
        """Returns that of every process that has lived for long, the oldest first."""
        lives = [*self._lives, *self._seen.values()]
        grown = [growth(seen) for seen in lives if len(seen) > 8]
        grown = [each for each in grown if each["seconds"] > LONG * self._seconds]
        return sorted(grown, key=lambda each: -each["seconds"])

    # --- between disturbances -------------------------------------------------------

    def _deal(self) -> Iterator[str]:
        """Yields names of disturbances: each once, in any order, and again."""
        all_of_it = ["death_of_all", "damaged_file", "full_disk", "failed_save"]
        one = ["kill", "leave", "full_disk", "stop", "storm", "slow_disk", "clock_jump"]
        one += ["kill", "join", "no_lighthouse"] if self._is_live else []
        while True:
            for deck in ([all_of_it] if self._is_early else []) + [one]:
                yield from self._random.sample(deck, len(deck))

    def _look(self) -> None:
        """Sees who has ended, starts others, and does what is to be done by now."""
        job = self._job
        job.look()
        self.ends += map(self._end, job.ended[len(self.ends) :])
        while self._may_start and len(job.running) < self._wanted:
            number = 1 if self._is_live else self._random.randint(1, MOST_REPLICAS)
            self.num_started += 1
            told = {"MEMBER_REPLICAS": number, "MEMBER_GENERATION": self.num_started}
            job.start(Weather(), **{name: str(each) for name, each in told.items()})
        if not self._is_early and self._spared not in job.running:
            self._spared = (self._ready() or [None])[-1]
        now = time.monotonic()
        if now > self._looked + self._look_seconds:
            self._looked, before = now, self._seen
            self._seen = {p: before.pop(p, []) for p in self._tree(self._ready())}
            self._lives += before.values()
            for pid, seen in self._seen.items():
                with contextlib.suppress(OSError, ValueError):  # it has just ended
                    seen.append((now, *signs(pid)))
        for each in [each for each in self._later if each[0] < now]:
            self._later.remove(each)
            each[1]()
        time.sleep(0.02)

    def _end(self, process: BaseProcess) -> str:
        """Returns how a process has ended."""
        status, path = process.exitcode, self._job.folder / f"{process.pid}.txt"
        text = path.read_text() if path.exists() else ""
        if status == 0:
            return "with the run"
        for harm in self._harms[process.pid]:
            if status in STATUSES.get(harm, ()):
                return harm
        said = [cause for cause in CAUSES if cause in text]
        return said[0] if said else f"unexplained, status {status}: {text[-2000:]}"

    def _ready(self) -> list[BaseProcess]:
        """Returns the processes that train."""
        folder = self._job.folder
        return [p for p in self._job.running if (folder / f"{p.pid}.ready").exists()]

    def _tree(self, processes: Iterable[BaseProcess]) -> list[int]:
        """Returns the ids of processes that live, and of all that they have started."""
        pids = [p.pid for p in processes if p in self._job.running and p.is_alive()]
        return [each for pid in pids for each in (pid, *descendants(pid))]

    def _send(self, number: int, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _after(self, most: float, function: Callable[..., Any], *args: Any) -> None:
        """Calls a function after at most so many seconds, and at least half of them."""
        at = time.monotonic() + self._random.uniform(most / 2, most)
        self._later.append((at, lambda: function(*args)))

    def _one(self, harm: str) -> list[BaseProcess]:
        """Returns a process that may be lost, if there is one."""
        others = [each for each in self._job.running if each is not self._spared]
        # Without a lighthouse, the last of several members ends.
        is_safe = self._may_start or len(self._ready()) > 2
        victims = self._random.sample(others, min(is_safe, len(others)))
        self._note(victims, harm)
        return victims

    def _note(self, victims: list[BaseProcess], harm: str) -> None:
        for victim in victims:
            self._harms[victim.pid].add(harm)

    # --- disturbances; what they return is false where they are out of place --------

    def _kill(self, victims: list[BaseProcess] | None = None) -> list[BaseProcess]:
        victims = victims or self._one("killed")
        self._note(victims, "killed")
        self.num_kills += len(victims)
        self._send(signal.SIGKILL, self._tree(victims))
        return victims

    def _death_of_all(self) -> None:
        self._kill(self._job.running)
        self._job.wait(lambda: not self._job.running)

    def _damaged_file(self) -> bool:
        if len(self._job.saved()) < 2:
            return False
        self._death_of_all()
        newest = self._job.saved()[0].path
        content = bytearray(newest.read_bytes())
        at = self._random.randrange(len(content))
        content[at] ^= 0xFF
        if self._random.random() < 0.5:
            del content[at:]
        newest.write_bytes(content)
        return True

    def _leave(self) -> list[BaseProcess]:
        """A process is asked to stop, and again and again, perhaps."""
        victims = self._one("left")
        self._wanted = max(self._wanted - 1, 2) if self._is_live else 1
        for _ in range(self._random.choice((1, 40))):
            self._send(signal.SIGTERM, self._tree(victims)[:1])
            self._look()
        return victims

    def _join(self) -> None:
        self._wanted = min(self._wanted + 1, MOST_MEMBERS)

    def _stop(self) -> None:
        """A process is stopped: one that may be lost for long."""
        victims, seconds = self._one("stopped"), 4 * HEARTBEAT_SECONDS
        if not victims or self._random.random() < 0.5:
            victims, seconds = [self._random.choice(self._job.running)], 0.3
        self._send(signal.SIGSTOP, self._tree(victims))
        self._after(seconds, lambda: self._send(signal.SIGCONT, self._tree(victims)))

    def _storm(self) -> None:
        """Signals that all must bear, and pauses of a moment."""
        for _ in range(40):
            for number in (*self._random.sample(HARMLESS, 2), signal.SIGSTOP):
                self._send(number, self._tree(self._job.running))
            self._send(signal.SIGCONT, self._tree(self._job.running))
            self._look()

    def _full_disk(self) -> list[BaseProcess]:
        """Processes cannot write, and others do not start for a while."""
        if not self._may_start:
            return []
        victims = self._job.running if self._is_early else self._one("full disk")
        self._note(victims, "full disk")
        for pid in self._tree(victims):
            with contextlib.suppress(ProcessLookupError):
                hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (ROOM, hard))
        if self._is_early:
            self._may_start = False
            self._after(2.0, setattr, self, "_may_start", True)
        return victims

    def _failed_save(self) -> None:
        self._job.tell("disk", -1)
        self._after(3.0, self._job.tell, "disk", 0)

    def _slow_disk(self) -> None:
        self._job.tell("disk", self._random.uniform(0, 0.4 * HEARTBEAT_SECONDS))
        self._after(5.0, self._job.tell, "disk", 0)

    def _clock_jump(self) -> None:
        days = self._random.choice((-1, 1)) * self._random.expovariate(1.0)
        self._job.tell("clock", 86400 * days)

    def _no_lighthouse(self) -> bool:
        is_quiet = len(self._ready()) == len(self._job.running) == self._wanted
        # Nor may a member lose the others and the lighthouse at once: it would end.
        if not self._may_start or not (self._is_early or is_quiet):
            return False
        self.light.close()
        self._may_start = False
        self._after(1.0, self.shine, self._lighthouse)
        return True


def abuse(
    folder: Path, kind: str, seconds: float, seed: int, is_quiet: bool = True
) -> dict[str, Any]:
    """Returns what has become of a run that was tormented, and of one that was not.

    Args:
        folder: An empty one.
        kind: "live" or "emulated".
        seconds: For how long the run is tormented; it then ends in peace.
        seed: Of what is done, and when, and of the trace.
        is_quiet: Whether no progress is shown.
    """
    dealt, trace = random.Random(seed), folder / "trace.csv"
    sizes = [MINIBATCH * dealt.randint(1, MOST_MINIBATCHES) for _ in range(10**5)]
    trace.write_text("\n".join(["batchsize", *map(str, sizes)]))
    arguments = ["--epochs", str(10**6), "--trace", str(trace)]
    lighthouse, xla = Lighthouse(HEARTBEAT_SECONDS), {}
    variables = {
        **lighthouse.variables, "LIVE_TOKEN": "secret", "LIVE_TIMEOUT_SECONDS": "20"
    }  # fmt: skip
    if kind == "emulated":
        xla = {"PJRT_DEVICE": "CPU"}
        variables = {**xla, "MEMBER_DEVICE": "xla"}
    pace = ["--minibatch-seconds", "0.02"]
    job = LiveJob(folder / "tormented", [*arguments, *pace], variables)
    alone = LiveJob(folder / "alone", arguments, xla)
    torment = Torment(job, kind, seconds, seed)
    bar = tqdm(total=seconds, disable=is_quiet, mininterval=seconds / 120)
    with contextlib.closing(bar), torment.light, job.stopped(), alone.stopped():
        if kind == "live":
            torment.shine(lighthouse)
        torment(bar)
        number = torment.end(60 + seconds)
        alone.tell("end", number)
        alone.start()
        [expected] = alone.wait(alone.results, 60 + seconds)
    log = vbs.read_run(job.folder / "run.jsonl").updates
    return {
        "kind": kind,
        "seed": seed,
        "seconds": seconds,
        "disturbances": dict(torment.done.most_common()),
        "processes": {"started": torment.num_started, "killed": torment.num_kills},
        "ends": dict(Counter(torment.ends).most_common()),
        "updates": number,
        "samples lost or doubled": differences(job, alone),
        "lines of the log missing": len({*range(number)} ^ {*log.step}),
        "jumps of the clock in it": int((log.time.diff().abs() > 600).sum()),
        "growth": torment.growth(),
        "hash": sorted({result["hash"] for result in job.results()}),
        "hash undisturbed": expected["hash"],
    }


def problems(outcome: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a run that was tormented."""
    found = [end for end in outcome["ends"] if end.startswith("unexplained")]
    if outcome["hash"] != [outcome["hash undisturbed"]]:
        found.append(f"{outcome['hash']} is not {outcome['hash undisturbed']}")
    for name in ("samples lost or doubled", "lines of the log missing"):
        if outcome[name]:
            found.append(f"{name}: {outcome[name]}")
    if not outcome["growth"]:
        found.append("no process has lived for long")
    for life in outcome["growth"]:
        for sign, most in SIGNS.items():
            before, after = life[sign]
            if after - before > (most * before if most < 1 else most):
                found.append(f"{sign}: {before} has become {after}")
    return found


def main() -> None:
    """Runs the command line."""
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    add("kind", choices=PAUSE, help="what is tormented, see above")
    help = "torment one run for so long (default: 60; of live runs, many)"
    add("--seconds", type=float, help=help)
    help = f"many live runs, until these were disturbed by {live_runs.WHOLE}"
    add("--whole", action="store_true", help=help)
    add("--log", type=Path, help="of many live runs, which it continues")
    add("--quick", action="store_true", help="for ten seconds")
    drawn = random.randrange(10**6)
    add("--seed", type=int, default=drawn, help="default: drawn anew, and printed")
    args = parser.parse_args()
    seconds = 10.0 if args.quick else args.seconds or 60.0
    folder = Path(tempfile.mkdtemp(prefix="abuse-"))
    print(f"seed {args.seed}, in {folder}", flush=True)
    if args.kind == "live" and not (args.quick or args.seconds):
        log = args.log or folder / "runs.jsonl"
        most = float("inf") if args.whole else 60.0
        lines = live_runs.torment(folder, log, live_runs.WHOLE, most, args.seed)
        print(live_runs.table(lines), f"log: {log}", sep="\n")
        sys.exit(any(line["problems"] for line in lines))
    outcome = abuse(folder, args.kind, seconds, args.seed, is_quiet=False)
    save(args.output, outcome)
    for name, value in outcome.items():
        print(f"{name}: {value}")
    if found := problems(outcome):
        sys.exit("\n".join(found))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
