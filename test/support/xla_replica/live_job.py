"""Runs `member.py` as several members, of which each meets the fate it is given."""

import contextlib
import errno
import importlib.util
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest
import torch
from torch import nn

import xla_replica
from support.xla_replica import torchtpu
from support.xla_replica.live_process import be_member
from support.xla_replica.torchrun import free_port, wait_for_server
from variable_batch_size.checkpoint import files
from variable_batch_size.checkpoint.files import SavedFile, saved_files
from variable_batch_size.data.schedule import Step
from variable_batch_size.live.exact import ExactModel
from variable_batch_size.step.scaling import Scaling
from xla_replica.members import member_replica, state_pieces
from xla_replica.members.member_replica import MemberReplica
from xla_replica.members.membership import Membership
from xla_replica.starting import child_process

# What a member can be at when it dies, and the function that it is then in.
PHASES = {
    "forward": ("torch.nn", "Sequential", "forward"),
    "sum": ("xla_replica.members.member_replica", "MemberReplica", "all_reduce_"),
    "update": ("variable_batch_size.step.scaling", "Scaling", "step"),
    "callbacks": ("variable_batch_size.step.attached", "Attached", "run"),
    "set_epoch": ("variable_batch_size.optimizer", "ElasticOptimizer", "set_epoch"),
    "evaluation": ("support.variable_batch_size.member", "Evaluation", "__call__"),
    "save": ("variable_batch_size.checkpoint.checkpointer", "Checkpointer", "_save"),
    "transfer": ("xla_replica.members.member_replica", "MemberReplica", "share"),
}
# Further ones of members whose sums are of floats.
FLOAT_PHASES = {
    "begin": ("xla_replica.members.member_replica", "MemberReplica", "begin_sum"),
    "wait": ("xla_replica.members.member_replica", "MemberReplica", "_wait"),
    "order": ("xla_replica.backends.overlapped_sum", "OverlappedSum", "_learn_order"),
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
        module, owner, name = {**PHASES, **FLOAT_PHASES}[self.phase]
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


class DiesWriting(NamedTuple):
    """The first of several members that writes a checkpoint dies there, or fails."""

    has_space: bool = True

    def arm(self, folder: Path) -> None:
        inner = files.write

        def write(*arguments: Any) -> Path:
            if self.has_space:
                die_first(folder)
            else:
                with contextlib.suppress(FileExistsError):
                    (folder / "died").touch(exist_ok=False)
                    raise OSError(errno.ENOSPC, "No space left on device")
            return inner(*arguments)

        files.write = write


class DiesMeeting:
    """The oldest of those who meet because others have gone dies there, once.

    Once the folder has a file "armed".
    """

    def arm(self, folder: Path) -> None:
        inner, sizes = MemberReplica._join, [0]
        # Who waited for it would wait for much longer than a busy machine takes.
        member_replica._CONNECT_SECONDS = 60.0

        def join(replica: MemberReplica) -> None:
            sizes.append(len(replica.met.members))
            is_smaller = sizes[-1] < sizes[-2] and (folder / "armed").exists()
            if is_smaller and replica.member == 0:
                die_first(folder)
            inner(replica)

        MemberReplica._join = join


class DiesAmidPieces(NamedTuple):
    """The first member that sends a state in pieces, or receives one, dies there.

    Once the folder has a file "armed", after some pieces, which are small.
    """

    sends: bool

    def arm(self, folder: Path) -> None:
        state_pieces.PIECE_BYTES = 256
        inner, keep = state_pieces.deliver, state_pieces.Pieces.keep

        def deliver(group: Any, member: int, pieces: Any, found: list[Any]) -> None:
            place = 1 if self.sends else 2
            own = [each for each in found if each[place] == member]
            if own and (folder / "armed").exists():
                inner(group, member, pieces, own[:3])
                die_first(folder)
                own = own[3:]
            inner(group, member, pieces, own or found)

        def noted_keep(pieces: Any, earlier: Any) -> None:
            keep(pieces, earlier)
            if (pieces.sums != -1).any():
                (folder / f"{os.getpid()}.kept").touch()

        member_replica.deliver, state_pieces.Pieces.keep = deliver, noted_keep


def die_first(folder: Path) -> None:
    """Ends this process, unless it has ended another one."""
    with contextlib.suppress(FileExistsError):
        (folder / "died").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


class Loss(NamedTuple):
    """A member alone loses the sums of these steps, which all others have."""

    steps: tuple[int, ...]

    def arm(self, folder: Path) -> None:
        inner, left = ExactModel.look, [*self.steps]

        def look(exact: ExactModel, step: Step) -> None:
            if not [*folder.glob("*.joined")]:
                (folder / f"{step.global_step}.joined").touch()
            inner(exact, step)
            if step.global_step in left:
                left.remove(step.global_step)
                (folder / f"{os.getpid()}.{step.global_step}.lost").touch()
                raise xla_replica.MemberLost("this member has lost the others' sums")

        ExactModel.look = look


class Hang(NamedTuple):
    """A member hangs in a forward pass, while its process and its heartbeat live.

    That many turns after a file of this name is in the folder, if it has a name.
    """

    turn: int
    seconds: float = 600.0
    since: str = ""

    def arm(self, folder: Path) -> None:
        inner, turns = nn.Sequential.forward, iter(range(self.turn))

        def forward(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
            met, has_begun = folder / f"{os.getpid()}.met", folder / self.since
            if has_begun.exists() and next(turns, None) is None and not met.exists():
                met.touch()
                time.sleep(self.seconds)
            return inner(module, inputs)

        nn.Sequential.forward = forward


class Silence:
    """A member alone believes after every seventh heartbeat that it was silent."""

    def arm(self, folder: Path) -> None:
        inner, turns = Membership._note_silence, itertools.cycle(range(7))

        def note(membership: Membership, since: float) -> None:
            inner(membership, since if next(turns) else -math.inf)

        Membership._note_silence = note


class Flip(NamedTuple):
    """A member alone changes a weight, after these updates."""

    steps: tuple[int, ...]

    def arm(self, folder: Path) -> None:
        inner = Scaling.step

        def step(scaling: Scaling, *numbers: Any) -> Any:
            found = inner(scaling, *numbers)
            if scaling._run.sampler.ledger.global_step in self.steps:
                parameter = scaling._run.parameters()[0]
                parameter.data.view(-1)[0] *= 1.5
            return found

        Scaling.step = step


class Weather:
    """The disk and the clock of a process, as its job tells: see `LiveJob.tell`."""

    def arm(self, folder: Path) -> None:
        fsync, now = os.fsync, time.time

        def told(name: str) -> float:
            with contextlib.suppress(OSError):
                return float((folder / name).read_text())
            return 0.0

        def slow(descriptor: int) -> None:
            seconds = told("disk")
            if seconds < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            time.sleep(seconds)
            fsync(descriptor)

        os.fsync = slow
        time.time = lambda: now() + told("clock")


class LiveJob:
    """Members of one run, which write into a folder that is new.

    They are given the arguments of `member.main` after the folder, and variables.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], environment: Any):
        folder.mkdir()
        self.folder, self._arguments = folder, [str(folder), *arguments]
        self._environment = environment
        self.running: list[BaseProcess] = []
        self.ended: list[BaseProcess] = []

    def start(self, fate: Any = None, **environment: str) -> BaseProcess:
        arguments = {**self._environment, **environment}, self._arguments, fate
        # A server has imported torch, and so TorchTPU's runtime, which cannot fork.
        method = "spawn" if torchtpu.is_installed() else "forkserver"
        start = child_process._context(method).Process
        process = start(target=be_member, args=arguments)
        process.start()
        self.running.append(process)
        return process

    def tell(self, name: str, number: float) -> None:
        """Tells members the last update, "end", or what a `Weather` is to do.

        That is by how many seconds the "disk" is slow, -1 for a full one, or by how
        many the "clock" is wrong.
        """
        unfinished = self.folder / f"{name}.new"
        unfinished.write_text(str(number))
        unfinished.rename(self.folder / name)  # whole, for who reads it meanwhile

    def look(self) -> list[BaseProcess]:
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
        return "\n".join(path.read_text() for path in self.folder.glob("*.txt"))

    def is_heard(self) -> bool:
        """Returns whether the lighthouse hears of a member, which waits there."""
        with urlopen(f"{self._environment['LIVE_LIGHTHOUSE']}/status") as page:
            text = re.sub(r"<[^>]*>", "", page.read().decode())
        ages = re.findall(r"member-\w+: seen ([0-9.e+-]+)s ago", text)
        return any(float(age) < 0.5 for age in ages)

    def num_met(self) -> int:
        return len(list(self.folder.glob("*.met")))

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(p.read_text()) for p in self.folder.glob("*.json")]

    def saved(self) -> list[SavedFile]:
        return saved_files(self.folder / "checkpoints")

    def num_updates(self) -> int:
        path = self.folder / "run.jsonl"
        return path.read_text().count('"lr"') if path.exists() else 0

    def num_ready(self) -> int:
        """Returns how many of the running members train."""
        files = os.listdir(self.folder)
        return sum(f"{each.pid}.ready" in files for each in self.running)

    def check_samples(self) -> int:
        """Asserts that every update is of its step's samples; returns their number."""
        return len(self.used())

    def used(self) -> dict[int, list[Counter[int]]]:
        """Returns by update the samples of every attempt at it: all of them, once."""
        ran, sizes, found = defaultdict(Counter), {}, defaultdict(list)
        for path in self.folder.glob("*.samples"):
            for text in path.read_text().splitlines():
                if not text.endswith("}"):  # cut off, where the disk was full
                    continue
                line = json.loads(text)
                attempt = line["step"], line["generation"], line["attempt"]
                if "samples" in line:
                    ran[attempt].update(line["samples"])
                else:
                    sizes[attempt] = line["batch_size"]
        for attempt, size in sizes.items():
            samples = ran[attempt]
            assert len(samples) == size == samples.total(), attempt
            found[attempt[0]].append(samples)
        return found

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Kills what is left after a ``with`` block."""
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        for process in self.running:
            process.kill()
            process.join()


class Lighthouse:
    """One in a process of its own, which is there in a ``with`` block, each time.

    Attributes:
        variables: Of its members' environment.
    """

    def __init__(self, heartbeat_seconds: float) -> None:
        self._port, seconds = free_port(), str(heartbeat_seconds)
        self.variables = {
            "LIVE_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
            "LIVE_HEARTBEAT_SECONDS": seconds,
        }
        self._command = [
            sys.executable, "-m", "xla_replica.members", "--heartbeat-seconds", seconds,
            "lighthouse", "--bind", f"127.0.0.1:{self._port}",
        ]  # fmt: skip

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._command)
        wait_for_server(self._port)

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def live_job(
    folder: Path,
    *arguments: str,
    min_members: int = 1,
    seconds: float = 3.0,
    patience: float = 60.0,
    **more: str,
) -> Iterator[LiveJob]:
    """Runs a lighthouse; gives a job without members.

    A member that is silent for so many ``seconds``, as on a busy machine, is dead.
    """
    times = {"heartbeat_seconds": seconds, "patience": patience}
    with xla_replica.lighthouse(**times) as address:
        environment = {
            **more,
            "LIVE_LIGHTHOUSE": address,
            "LIVE_TOKEN": "secret",
            "LIVE_MIN_MEMBERS": str(min_members),
            "LIVE_HEARTBEAT_SECONDS": str(seconds),
            "LIVE_PATIENCE_SECONDS": str(patience),
        }
        job = LiveJob(folder, arguments, environment)
        with job.stopped():
            yield job
