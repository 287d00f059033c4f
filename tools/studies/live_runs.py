"""Disturbs many short live runs, each as its seed draws it, and checks all of them.

Members are killed, join, hang while their heartbeat goes on, are paused all at once and
continued one after another, and are killed within a second of the run's end. Afterwards
every update must be of its samples, weights those of an undisturbed run (the bits of
exact sums; floats of 64 bits to 1e-12), the last checkpoint there, and no member that
was neither killed nor hung for longer than the patience may have ended with an error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from support.variable_batch_size.member import MINIBATCH, NUM_SAMPLES, TRACE
from support.xla_replica.live_job import (
    FLOAT_PHASES,
    PHASES,
    Fate,
    Hang,
    LiveJob,
    live_job,
)

import variable_batch_size as vbs

WHOLE = {
    "kills": 200, "joins": 80, "hangs": 40, "staggered pauses": 40, "late kills": 20
}  # fmt: skip
HEARTBEAT_SECONDS, TIMEOUT_SECONDS, PATIENCE_SECONDS = 1.0, 4.0, 5.0
LONG_SECONDS = TIMEOUT_SECONDS + PATIENCE_SECONDS + 6.0  # until others are without it
MOST_SECONDS = 300.0  # of a run
EPOCHS, SAVE_EVERY, TOLERANCE = 10, 5, 1e-12
SETTINGS = (
    ("--kind", "plain"), ("--kind", "adascale"), ("--kind", "rigl"),
    ("--kind", "projected"), ("--float",), ("--float", "--kind", "adascale"),
    ("--float", "--kind", "tokens"),
)  # fmt: skip
NUM_UPDATES = vbs.Schedule(vbs.Trace(TRACE), NUM_SAMPLES, MINIBATCH, "cycle").steps(
    EPOCHS - 1
).stop  # fmt: skip


def differences(job: LiveJob, alone: LiveJob) -> int:
    """Returns how many samples updates lack, or have too often."""
    used, found = job.used(), 0
    for step, [expected] in alone.used().items():
        for samples in used.pop(step, [Counter()]):
            found += (expected - samples).total() + (samples - expected).total()
    return found + sum(sum(each, Counter()).total() for each in used.values())


class DisturbedRun:
    """One run; what is done to it, and when, follows from its seed.

    Attributes:
        settings: The arguments of its members.
        done: How often each disturbance has happened.
    """

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self.settings = draw.choice(SETTINGS)
        self.done: Counter[str] = Counter()
        numbers = {
            "kill": draw.randint(2, 5),
            "join": draw.randint(1, 3),
            "hang": draw.randint(1, 2),
            "pause": draw.randint(1, 2),
        }
        names = [name for name, number in numbers.items() for _ in range(number)]
        # Each at an update: the run does not end before.
        self._plan = [(draw.uniform(0.03, 0.85) * NUM_UPDATES, name) for name in names]
        self._plan.sort()
        if draw.random() < 0.6:  # within a second of the end
            self._plan.append((NUM_UPDATES - draw.randint(0, 10), "late_kill"))
        self._fates: dict[int, Any] = {}  # by process
        self._killed: set[int] = set()
        self._hung: dict[int, float] = {}  # when these are killed

    def __call__(self, folder: Path) -> LiveJob:
        """Runs it in a folder that is new; returns the job, when it has ended."""
        times = {
            "seconds": HEARTBEAT_SECONDS,
            "patience": PATIENCE_SECONDS,
            "LIVE_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS),
        }
        words = (
            "--epochs", str(EPOCHS), "--save-every", str(SAVE_EVERY),
            "--workers", str(self._draw.choice((0, 0, 1))),
            "--minibatch-seconds", "0.04",
        )  # fmt: skip
        with live_job(folder, *self.settings, *words, **times) as job:
            self._job = job
            for _ in range(self._draw.randint(2, 4)):
                job.start()
            give_up = time.monotonic() + MOST_SECONDS
            while job.running and time.monotonic() < give_up:
                self._look()
                if len(self._ready()) > 1 and not job.results():
                    self._disturb(job.num_updates())
                time.sleep(0.02)
            self.is_stuck = bool(job.running)
        return job

    def _look(self) -> None:
        """Notes who meets a fate, and starts others for those that were killed."""
        job, now = self._job, time.monotonic()
        for pid, fate in [*self._fates.items()]:
            if (job.folder / f"{pid}.met").exists():
                del self._fates[pid]
                if isinstance(fate, Fate):
                    self.done["kills"] += 1
                    self._killed.add(pid)
                elif fate.seconds > LONG_SECONDS:
                    self.done["hangs"] += 1
                    self._hung[pid] = now + LONG_SECONDS
                else:
                    self.done["short hangs"] += 1
        for process in job.running:
            if now > self._hung.get(process.pid, float("inf")):
                process.kill()
        for process in job.look():
            self._fates.pop(process.pid, None)
            if process.exitcode and not job.results():
                self._start(self._draw_death() if self._draw.random() < 0.4 else None)

    def _draw_death(self) -> Fate:
        is_float = "--float" in self.settings
        phases = [*PHASES, *(FLOAT_PHASES if is_float else ())]
        return Fate(self._draw.choice(phases), self._draw.randrange(12))

    def _start(self, fate: Any = None) -> None:
        pid = self._job.start(fate).pid
        if fate is not None:
            self._fates[pid] = fate

    def _ready(self) -> list[BaseProcess]:
        """Returns the members that train and are to do so."""
        folder, lost = self._job.folder, self._killed | {*self._hung}
        running = [each for each in self._job.running if each.pid not in lost]
        return [each for each in running if (folder / f"{each.pid}.ready").exists()]

    def _disturb(self, num_updates: int) -> None:
        """Does what is due, with at least two members that train."""
        if self._plan and num_updates >= self._plan[0][0]:
            getattr(self, f"_{self._plan.pop(0)[1]}")()

    def _late_kill(self) -> None:
        time.sleep(self._draw.uniform(0, 0.2))
        if self._ready():
            self._kill("late kills")

    def _kill(self, name: str = "kills") -> None:
        [victim] = self._draw.sample(self._ready(), 1)
        self._killed.add(victim.pid)
        self.done[name] += victim.is_alive()
        victim.kill()

    def _join(self) -> None:
        self.done["joins"] += 1
        self._start()

    def _hang(self) -> None:
        is_long = self._draw.random() < 0.75
        seconds = 600.0 if is_long else self._draw.uniform(1, TIMEOUT_SECONDS + 1)
        self._start(Hang(self._draw.randrange(30), seconds))

    def _pause(self) -> None:
        self.done["staggered pauses"] += 1
        members = [*self._job.running]
        for number, seconds in (
            (signal.SIGSTOP, 0.0), (signal.SIGCONT, 1.5 * HEARTBEAT_SECONDS)
        ):  # fmt: skip
            self._draw.shuffle(members)
            for member in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, number)
                time.sleep(seconds)
            if number == signal.SIGSTOP:
                time.sleep(3 * HEARTBEAT_SECONDS)

    def problems(self, alone: LiveJob) -> list[str]:
        """Returns what is wrong with the run, beside one that nobody disturbed."""
        job, found = self._job, ["it has not ended"] if self.is_stuck else []
        for member in job.ended:
            pid, status = member.pid, member.exitcode
            if status and pid not in self._killed | {*self._hung}:
                path = job.folder / f"{pid}.txt"
                text = path.read_text() if path.exists() else "it has said nothing"
                found.append(f"{pid}, healthy, has ended with {status}: {text[-1500:]}")
        try:
            if number := differences(job, alone):
                found.append(f"{number} samples are lost or doubled")
        except AssertionError as error:
            found.append(f"an update is not of its samples: {error}")
        results = {str(each) for each in job.results()}
        if len(results) != 1:
            found.append(f"members end with {results}")
        elif "--float" not in self.settings:
            [expected] = alone.results()
            if results != {str(expected)}:
                found.append(f"{results}, undisturbed {expected}")
        else:
            paths = (next(each.folder.glob("*.values")) for each in (job, alone))
            self.error = max(map(relative_error, *map(torch.load, paths)))
            if self.error > TOLERANCE:
                found.append(f"weights differ by {self.error:.1e}")
        saved = [each.num_updates for each in job.saved()]
        if saved[:1] != [NUM_UPDATES]:
            found.append(f"checkpoints are of {saved} updates of {NUM_UPDATES}")
        return found


def relative_error(own: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest number."""
    scale = other.abs().max().double().clamp(min=1e-300)
    return float((own - other).abs().max() / scale)


def torment(
    folder: Path, log: Path, wanted: dict[str, int], seconds: float, seed: int
) -> list[dict[str, Any]]:
    """Disturbs runs until all is done that is wanted, or the time is up.

    Args:
        folder: For the runs.
        log: Gets a line of JSON for each run; those that it has count, too.
        wanted: How often each disturbance is to happen.
        seed: Of the first run, if the log has none; others have the next ones.

    Returns:
        The lines.
    """

    @functools.cache
    def alone(settings: tuple[str, ...]) -> LiveJob:
        words = (*settings, "--epochs", str(EPOCHS))
        # A member, too: others seed dropout and move running statistics differently.
        with live_job(folder / "-".join(("alone", *settings)), *words) as job:
            job.start()
            job.wait(lambda: not job.running, MOST_SECONDS)
            return job

    lines = []
    if log.exists():
        lines = [json.loads(text) for text in log.read_text().splitlines()]
    began = time.monotonic()
    seed = max((line["seed"] + 1 for line in lines), default=seed)
    while missing(lines, wanted) and time.monotonic() - began < seconds:
        run, since = DisturbedRun(seed), time.monotonic()
        expected = alone(run.settings)
        job = run(folder / str(seed))
        line = {
            "seed": seed,
            "settings": " ".join(run.settings),
            "done": dict(run.done),
            "processes": len(job.ended) + len(job.running),
            "problems": run.problems(expected),
            "error": getattr(run, "error", None),
            "seconds": round(time.monotonic() - since),
        }
        lines.append(line)
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line | {"problems": len(line["problems"])}), flush=True)
        seed += 1
    return lines


def totals(lines: list[dict[str, Any]]) -> Counter[str]:
    """Returns how often each disturbance has happened."""
    return sum((Counter(line["done"]) for line in lines), Counter())


def missing(lines: list[dict[str, Any]], wanted: dict[str, int]) -> Counter[str]:
    """Returns how often each disturbance is still to happen."""
    return Counter(wanted) - totals(lines)


def table(lines: list[dict[str, Any]]) -> str:
    """Returns counts as a table of Markdown, and the problems below it."""
    floats = [line for line in lines if "--float" in line["settings"]]
    errors = [line["error"] for line in floats if line["error"] is not None]
    rows = {
        "runs, exact": len(lines) - len(floats),
        "runs, float": len(floats),
        "processes": sum(line["processes"] for line in lines),
        **totals(lines),
        "largest relative error of floats": f"{max(errors, default=0):.1e}",
        "runs with a problem": sum(bool(line["problems"]) for line in lines),
    }
    texts = [f"| {name} | {value} |" for name, value in rows.items()]
    for line in lines:
        texts += [f"seed {line['seed']}: {each}" for each in line["problems"]]
    return "\n".join(texts)
