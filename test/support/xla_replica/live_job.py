"""Runs `member.py` as several members, of which each meets the fate it is given."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.xla_replica import torchtpu
from support.xla_replica.live_process import be_member
from xla_replica.starting import child_process

# What a member can be at when it dies, and the function that it is then in.
PHASES = {
    "forward": ("torch.nn", "Sequential", "forward"),
    "sum": ("xla_replica.members.member_replica", "MemberReplica", "all_reduce_"),
    "update": ("variable_batch_size.rules.scaling", "Scaling", "step"),
    "callbacks": ("variable_batch_size.step.attached", "Attached", "run"),
    "set_epoch": ("variable_batch_size.optimizer", "ElasticOptimizer", "set_epoch"),
    "evaluation": ("support.variable_batch_size.member", "Evaluation", "__call__"),
    "save": ("variable_batch_size.checkpoint.checkpointer", "Checkpointer", "_save"),
    "transfer": ("xla_replica.members.member_replica", "MemberReplica", "share"),
}
_LATEST = {"set_epoch": 0.05, "transfer": 0.01}  # seconds after a phase has begun

needs_lighthouse = pytest.mark.skipif(
    not importlib.util.find_spec("torchft"), reason="needs torchft"
)


class Fate(NamedTuple):
    """A member dies, stops for a while or leaves, after ``turn`` times of a phase."""

    phase: str
    turn: int
    signal: int = signal.SIGKILL

    def arm(self, folder: Path) -> None:
        """Has this process meet it, and leave a file there when it does."""
        module, owner, name = PHASES[self.phase]
        kind = getattr(importlib.import_module(module), owner)
        inner, turns = getattr(kind, name), iter(range(self.turn))
        latest = _LATEST.get(self.phase, 0.003)

        def counted(*args: Any, **options: Any) -> Any:
            if next(turns, None) is None and not armed.is_set():
                armed.set()
                (folder / f"{os.getpid()}.met").touch()
                seconds = random.uniform(0, latest)
                threading.Timer(seconds, os.kill, (os.getpid(), self.signal)).start()
            return inner(*args, **options)

        armed = threading.Event()
        setattr(kind, name, counted)


class LiveJob:
    """Members of one run, at a lighthouse of their own.

    Args:
        folder: What members write into.
        arguments: Those of `member.main` after the folder.
        environment: Variables of all members.
    """

    def __init__(
        self, folder: Path, arguments: Sequence[str], environment: dict[str, str]
    ) -> None:
        folder.mkdir()
        self.folder, self._arguments = folder, [str(folder), *arguments]
        self._environment = environment
        self.running: list[BaseProcess] = []
        self.ended: list[BaseProcess] = []

    def start(self, fate: Fate | None = None, **environment: str) -> BaseProcess:
        """Starts one more member."""
        arguments = {**self._environment, **environment}, self._arguments, fate
        # A server has imported torch, and so TorchTPU's runtime, which cannot fork.
        method = "spawn" if torchtpu.is_installed() else "forkserver"
        context = child_process._context(method)
        process = context.Process(target=be_member, args=arguments)
        process.start()
        self.running.append(process)
        return process

    def look(self) -> list[BaseProcess]:
        """Returns the members that have ended since the last look."""
        new = [process for process in self.running if not process.is_alive()]
        self.running = [each for each in self.running if each not in new]
        self.ended += new
        return new

    def wait(self, until: Callable[[], Any], seconds: float = 120.0) -> Any:
        """Returns what ``until`` returns once that is true; fails if it takes long."""
        give_up = time.monotonic() + seconds
        while not (found := until()):
            assert time.monotonic() < give_up, self.log()
            self.look()
            time.sleep(0.02)
        return found

    def log(self) -> str:
        """Returns what all members have printed."""
        return "\n".join(path.read_text() for path in self.folder.glob("*.txt"))

    def num_met(self) -> int:
        """Returns how many fates have been met."""
        return len(list(self.folder.glob("*.met")))

    def results(self) -> list[dict[str, Any]]:
        """Returns what the members that have ended well have found."""
        return [json.loads(p.read_text()) for p in self.folder.glob("*.json")]

    def num_updates(self) -> int:
        """Returns how many updates the log tells of."""
        path = self.folder / "run.jsonl"
        return path.read_text().count('"lr"') if path.exists() else 0

    def num_ready(self) -> int:
        """Returns how many of the running members train."""
        ready = [self.folder / f"{each.pid}.ready" for each in self.running]
        return sum(path.exists() for path in ready)

    def check_samples(self) -> int:
        """Asserts that every update is of its step's samples; returns their number."""
        ran, commits, sizes = defaultdict(Counter), defaultdict(set), {}
        for path in self.folder.glob("*.samples"):
            for text in path.read_text().splitlines():
                line = json.loads(text)
                attempt = line["step"], line["generation"], line["attempt"]
                if "samples" in line:
                    ran[attempt].update(line["samples"])
                else:
                    commits[line["step"]].add(attempt)
                    sizes[line["step"]] = line["batch_size"]
        for step, attempts in commits.items():
            for attempt in attempts:
                samples = ran[attempt]
                assert len(samples) == sizes[step] == samples.total(), attempt
        return len(commits)

    def stop(self) -> None:
        """Kills what is left."""
        for process in self.running:
            process.kill()
            process.join()


@contextlib.contextmanager
def live_job(
    folder: Path,
    *arguments: str,
    min_members: int = 1,
    seconds: float = 3.0,
    **variables: str,
) -> Iterator[LiveJob]:
    """Runs a lighthouse; gives a job without members.

    A member that is silent for so many ``seconds``, as on a busy machine, is dead.
    """
    from xla_replica.members.supervisor import lighthouse

    with lighthouse(heartbeat_seconds=seconds) as address:
        environment = {
            **variables,
            "LIVE_LIGHTHOUSE": address,
            "LIVE_TOKEN": "secret",
            "LIVE_MIN_MEMBERS": str(min_members),
            "LIVE_HEARTBEAT_SECONDS": str(seconds),
        }
        job = LiveJob(folder, arguments, environment)
        try:
            yield job
        finally:
            job.stop()
