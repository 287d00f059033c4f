"""Runs a lighthouse, where members of a live run find each other, and such members.

examples:
  python -m xla_replica.members run --members 3 train.py
  python -m xla_replica.members lighthouse --bind 0.0.0.0:29510

A lighthouse alone is for members that are started one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from xla_replica.stopping import SIGNALS

logger = logging.getLogger(__name__)

_MILLISECONDS = 1000
_LOOK_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0  # for members that were asked to stop
_MOST = 2  # failures of each
_LONGEST_PAUSE_SECONDS = 60
_HOST = "127.0.0.1"
# The exit statuses of who was asked to stop.
_LEFT = (*(128 + n for n in SIGNALS), -signal.SIGTERM, -signal.SIGINT)


@contextlib.contextmanager
def lighthouse(
    bind: str = "127.0.0.1:0", heartbeat_seconds: float = 1.0, patience: float = 300.0
) -> Iterator[str]:
    """Runs a lighthouse in this process; gives its address.

    Args:
        bind: Where it listens. It asks nobody for a token: members do, of each other.
        heartbeat_seconds: After how long a member that is not heard of is dead.
        patience: Seconds for which it waits for a member that lives, but does not meet
            the others.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind,
        min_replicas=1,
        join_timeout_ms=int(patience * _MILLISECONDS),
        quorum_tick_ms=10,
        heartbeat_timeout_ms=int(heartbeat_seconds * _MILLISECONDS),
    )
    host, port = bind.rsplit(":", 1)[0], server.address().rsplit(":", 1)[1]
    host = socket.gethostname() if host in ("0.0.0.0", "[::]") else host
    try:
        yield f"http://{host}:{port}"
    finally:
        server.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m xla_replica.members", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--heartbeat-seconds", type=float, default=1.0, metavar="S",
        help="a member that is silent for so long is dead; members are told the same "
        "by LIVE_HEARTBEAT_SECONDS (default: 1)"
    )  # fmt: skip
    add("--patience", type=float, default=300.0, metavar="S",
        help="wait so long for a member that lives but does not meet the others "
        "(default: 300)"
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    about = "run the lighthouse alone; members set LIVE_LIGHTHOUSE"
    add = commands.add_parser("lighthouse", help=about, description=about).add_argument
    add("--bind", default="127.0.0.1:29510", metavar="HOST:PORT",
        help="where to listen; 0.0.0.0 for all interfaces (default: %(default)s)"
    )  # fmt: skip
    about = "run a script as several members, and start anew those that die"
    add = commands.add_parser("run", help=about, description=about).add_argument
    add("--members", type=int, default=2, metavar="N", help="default: 2")
    add("--processes", type=int, default=1, metavar="N",
        help="of each member, as torchrun would start them: they shard a model by "
        "FSDP2, or sum among themselves first (default: 1)"
    )  # fmt: skip
    add("script", nargs=argparse.REMAINDER, help="a Python script and its arguments")
    options = parser.parse_args(arguments)
    times = options.heartbeat_seconds, options.patience
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.command == "lighthouse":
        with lighthouse(options.bind, *times) as address:
            logger.info(f"members of this run set LIVE_LIGHTHOUSE={address}")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
        return
    if min(options.members, options.processes) < 1 or not options.script:
        parser.error("run needs --members and --processes of at least 1, and a script")
    with lighthouse("127.0.0.1:0", *times) as address:
        variables = {
            "LIVE_LIGHTHOUSE": address,
            "LIVE_HEARTBEAT_SECONDS": str(options.heartbeat_seconds),
            "LIVE_PATIENCE_SECONDS": str(options.patience),
            "LIVE_TOKEN": os.environ.get("LIVE_TOKEN") or secrets.token_hex(16),
        }
        numbers = options.members, variables, options.processes
        sys.exit(keep_running(options.script, *numbers))


class _Place:
    """Where one member runs after another, each as so many processes.

    Processes of a member are started as torchrun starts them; if one dies, so do all.

    Args:
        file: Which a member makes that has made an update.
        command: What each process runs.
        environment: Theirs, beside RANK, WORLD_SIZE and their like if they are several.
        number: How many processes a member has.

    Attributes:
        processes: Those of the member which runs there.
        num_failed: Members that have, one after another without an update.
        starts_at: When another one starts, where none runs.
    """

    def __init__(
        self, file: Path, command: list[str], environment: dict[str, str], number: int
    ) -> None:
        self.update_file, self._command, self._number = file, command, number
        self._environment = {**environment, "LIVE_UPDATE_FILE": str(file)}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.num_failed, self.starts_at = 0, 0.0

    def start(self) -> None:
        """Starts a member."""
        self.update_file.unlink(missing_ok=True)
        own: list[dict[str, str]] = [{}]
        if self._number > 1:
            from torch.distributed import TCPStore

            # At which they meet.
            self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
            place = {"MASTER_ADDR": _HOST, "MASTER_PORT": str(self._store.port)}
            size = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self._number))
            common = {**place, **size, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            ranks = map(str, range(self._number))
            own = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]
        whole = [{**self._environment, **each} for each in own]
        self.processes = [subprocess.Popen(self._command, env=each) for each in whole]
        self._status = 0  # of the first one that has not ended well

    def poll(self) -> int | None:
        """Returns how the member has ended; None if it runs, or there is none."""
        statuses = [process.poll() for process in self.processes]
        self._status = self._status or next(filter(None, statuses), 0)
        if self.processes and None not in statuses:
            return self._status
        if self._status and self._status not in _LEFT:
            for process in self.processes:
                process.kill()
        return None

    def plan_another(self, status: int) -> None:
        """Says when another member follows one that has died."""
        pause = min(2**self.num_failed // 2, _LONGEST_PAUSE_SECONDS)
        when = f" in {pause} s" if pause else ""
        pid = self.processes[0].pid
        logger.warning(f"member {pid} has died ({status}): another one{when}")
        self.processes, self.starts_at = [], time.monotonic() + pause


def keep_running(
    script: list[str],
    num_members: int,
    variables: dict[str, str],
    num_processes: int = 1,
) -> int:
    """Runs members, of so many processes each; returns the run's exit status.

    That is 0 if one has ended well, and nobody is started any more then; else 143 or
    130 if members were asked to leave, who are not replaced. A member that has died is:
    at once if it had made an update, else after twice as long each time. Where that
    happens again and again and none is left, its status is returned; sooner if nobody
    has made an update at all, and every member has died with one status.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # members end with it
    with tempfile.TemporaryDirectory(prefix="live-") as name:  # nobody else reads it
        folder, command = Path(name), [sys.executable, *script]
        exports = [f"export {key}={shlex.quote(v)}\n" for key, v in variables.items()]
        (folder / "variables").touch(0o600)
        (folder / "variables").write_text("".join(exports))
        several = "torchrun", "--standalone", f"--nproc-per-node={num_processes}"
        started = shlex.join([*several, *script] if num_processes > 1 else command)
        logger.info(f"another member: . {folder}/variables; {started}")
        how_started = command, {**os.environ, **variables}, num_processes
        places = [_Place(folder / str(n), *how_started) for n in range(num_members)]
        try:
            return _fill(places)
        except KeyboardInterrupt:
            return 130
        finally:
            _end(_processes(places))


def _fill(places: list[_Place]) -> int:
    """Has a member in every place until the run is over; see `keep_running`."""
    left = 0
    statuses: list[int | None] = []  # of who has died, None after an update
    while places:
        for place in places:
            if not place.processes and time.monotonic() >= place.starts_at:
                place.start()
        time.sleep(_LOOK_SECONDS)
        for place in [*places]:
            status = place.poll()
            if status == 0:
                for process in _processes(places):
                    process.wait()
                return 0
            if status in _LEFT:
                left = abs(status) % 128 + 128
                places.remove(place)
            elif status is not None:
                has_updated = place.update_file.exists()
                place.num_failed = 0 if has_updated else place.num_failed + 1
                statuses.append(None if has_updated else status)
                others = [each for each in places if each.processes]
                if others == [place] and _are_hopeless(places, statuses):
                    pid = place.processes[0].pid
                    logger.error(f"member {pid} and those before it have failed")
                    return status
                place.plan_another(status)
    return left


def _are_hopeless(places: Sequence[_Place], statuses: Sequence[int | None]) -> bool:
    """Returns whether members, none of which is left, would die again.

    In every place some have failed one after another; or all have failed alike, before
    anybody made an update, and one of them again.
    """
    are_alike = len({*statuses}) == 1 and None not in statuses
    is_soon = are_alike and len(statuses) > max(len(places), _MOST)
    return is_soon or all(place.num_failed > _MOST for place in places)


def _processes(places: Sequence[_Place]) -> list[subprocess.Popen[bytes]]:
    return [process for place in places for process in place.processes]


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Asks members to stop; kills them if they take long, or if asked once more."""
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(_PATIENCE_SECONDS)
    for process in processes:  # they wait for others, perhaps
        process.kill()
