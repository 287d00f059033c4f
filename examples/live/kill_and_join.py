"""Trains digits on three processes, ends them all, adds two, and compares the weights.

    python examples/live/kill_and_join.py

Two are killed, and one hangs: it lives, but computes nothing more. Every line is an
update, with the processes that have made it. In the meantime the same script trains in
one process that nobody disturbs, whose weights have the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import torch

import variable_batch_size as vbs
import xla_replica

HERE = Path(__file__).resolve().parent
NAMES = "ABCDE"
# What happens from which update on, as soon as three train.
FATES = (20, "A", "is killed"), (80, "C", "hangs"), (115, "B", "is killed")
ADDED_AT = 20
SIGNALS = {"is killed": signal.SIGKILL, "hangs": signal.SIGUSR1}  # see train_digits.py
PATIENCE_SECONDS = 3.0  # for one that hangs


class LiveRun:
    """Processes that train together, in a folder.

    Attributes:
        members: Who has made each update, such as "A B C".
        met: Names, and what has happened to them, by the update after it.
    """

    def __init__(self, folder: Path, lighthouse: str, minibatch_seconds: float) -> None:
        folder.mkdir(parents=True)
        self._folder, self._seconds = folder, minibatch_seconds
        self._environment = {
            **os.environ,
            "LIVE_LIGHTHOUSE": lighthouse,
            "LIVE_TOKEN": secrets.token_hex(16),
            "LIVE_MIN_MEMBERS": "2",
            "LIVE_TIMEOUT_SECONDS": str(PATIENCE_SECONDS),
            "LIVE_PATIENCE_SECONDS": str(PATIENCE_SECONDS),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._said, self._warned = (
            (folder / name).open("ab") for name in ("output.txt", "warnings.txt")
        )
        self.members: dict[int, str] = {}
        self.met: dict[int, tuple[str, str]] = {}

    def add(self, names: str) -> None:
        """Starts processes, which need nothing but the lighthouse's address."""
        for name in names:
            self._processes[name] = subprocess.Popen(
                training(self._folder, "--name", name, "--minibatch-seconds",
                         self._seconds),
                env=self._environment, stdout=self._said, stderr=self._warned,
            )  # fmt: skip

    def disturb(self, name: str, fate: str) -> None:
        """Kills a process, or lets it hang, of which the others are not told."""
        self._processes[name].send_signal(SIGNALS[fate])
        self.met[max(self.members) + 1] = name, fate

    def follow(self) -> Iterator[int]:
        """Yields every update when it is made, until all processes have ended."""
        with (self._folder / "output.txt").open() as output:
            has_ended = False
            while not has_ended:
                statuses = [each.poll() for each in self._processes.values()]
                if not {None, 0, -signal.SIGKILL}.issuperset(statuses):
                    sys.exit(f"a process has failed: see {self._warned.name}")
                has_ended = None not in statuses
                for line in output:
                    yield from self._read(line)
                time.sleep(0.01)

    def end(self) -> None:
        """Ends what still runs, after an error."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _read(self, line: str) -> Iterator[int]:
        found = re.search(r"update (\d+) is by (.*)", line)
        if "accuracy" in line:
            print(line, end="")
        elif found and int(found[1]) not in self.members:
            update, members = int(found[1]), found[2]
            self.members[update] = members
            for name, fate in self.met.values():
                if fate == "hangs" and name not in members:  # it would hang for ever
                    self._processes[name].kill()
            shown = " ".join(name if name in members else "·" for name in NAMES)
            print(f"update {update:3}   {shown}", flush=True)
            yield update


def training(folder: Path, *options: object) -> list[str]:
    """Returns the command that trains in a folder."""
    command = (sys.executable, HERE / "train_digits.py", folder, *options)
    return [str(word) for word in command]


def disturb(run: LiveRun) -> None:
    """Follows a run of A, B and C, adds D and E, and ends A, B and C."""
    run.add("ABC")
    fates = [*FATES]
    for update in run.follow():
        if fates and update >= fates[0][0] and len(run.members[update].split()) > 2:
            _, name, fate = fates.pop(0)
            until = ": the others wait, and go on" if fate == "hangs" else ""
            print(f"             {name} {fate}{until}", flush=True)
            run.disturb(name, fate)
        if update == ADDED_AT:
            print("             D and E are started, and join after their imports")
            run.add("DE")


def digest(folder: Path) -> str:
    """Returns a hash of all bits of a run's weights."""
    weights = torch.load(folder / "weights.pt", weights_only=True).values()
    content = b"".join(value.numpy().tobytes() for value in weights)
    return hashlib.sha256(content).hexdigest()[:16]


def draw(run: LiveRun, live: Path, alone: Path, path: Path) -> None:
    """Draws batch size, members and loss over updates, and when a member is lost."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), layout="constrained")
    sizes, lanes, losses = figure.subplots(3, sharex=True, height_ratios=(2, 2, 3))
    made, same = (vbs.read_run(each / "run.jsonl").updates for each in (live, alone))
    sizes.step(made["step"], made["batch_size"], where="post")
    sizes.set(ylabel="batch size\n(samples)", ylim=0)
    for row, name in enumerate(NAMES):
        parts = [(u, 1) for u, members in run.members.items() if name in members]
        lanes.broken_barh(parts, (row - 0.35, 0.7), color=f"C{row}")
    lanes.set(ylabel="processes", yticks=range(len(NAMES)), yticklabels=NAMES)
    lanes.invert_yaxis()
    losses.plot(made["step"], made["loss"], lw=4, alpha=0.5, label="live")
    losses.plot(same["step"], same["loss"], "k:", lw=1, label="one process alone")
    losses.set(ylabel="loss", yscale="log", xlabel="update of the weights")
    losses.legend()
    for update, (name, fate) in run.met.items():
        row = NAMES.index(name)
        lanes.plot(update, row, "kX", ms=10)
        lanes.annotate(
            f"{name} {fate}", (update, row), (9, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip
        for axis in (sizes, lanes, losses):
            axis.axvline(update, color="k", lw=0.8, ls="--")
    for axis in (sizes, losses):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    now = time.strftime("%Y%m%d-%H%M%S")
    parser.add_argument(
        "--folder", type=Path, default=Path(f"runs/live-{now}"),
        help="for logs, checkpoints and the picture (default: runs/live-TIME)",
    )  # fmt: skip
    parser.add_argument(
        "--minibatch-seconds", type=float, default=0.04,
        help="how long a minibatch seems to take (default: 0.04)",
    )  # fmt: skip
    args = parser.parse_args()
    live, alone, picture = (args.folder / n for n in ("live", "alone", "live.png"))
    undisturbed = subprocess.Popen(training(alone), stdout=subprocess.DEVNULL)
    with xla_replica.lighthouse(patience=PATIENCE_SECONDS) as address:
        run = LiveRun(live, address, args.minibatch_seconds)
        try:
            disturb(run)
        finally:
            run.end()
    if undisturbed.wait():
        return 1
    draw(run, live, alone, picture)
    print(f"picture: {picture}; learning rates too, and any other runs:")
    print(f"    vbs plot {live}/run.jsonl {alone}/run.jsonl")
    digests = digest(live), digest(alone)
    are_equal = digests[0] == digests[1]
    told = "equal, to the bit" if are_equal else "DIFFERENT"
    print(f"weights of this run, and of one process: {' and '.join(digests)}: {told}")
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
