"""Runs a lighthouse, and members of a live run on this machine."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from xla_replica.stopping import SIGNALS

logger = logging.getLogger(__name__)

_MILLISECONDS = 1000
_LOOK_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0  # for members that were asked to stop
_STEADY_SECONDS = 30.0  # one that has lived so long was not wrong from the start
_MOST_FAILURES = 2
_LONGEST_PAUSE_SECONDS = 60.0
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
        prog="python -m xla_replica.members",
        description="How do members of a live run start, and find each other?",
    )
    parser.add_argument(
        "--heartbeat-seconds", type=float, default=1.0, metavar="S",
        help="a member that is silent for so long is dead; members are told the same "
        "by LIVE_HEARTBEAT_SECONDS (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--patience", type=float, default=300.0, metavar="S",
        help="wait so long for a member that lives but does not meet the others "
        "(default: 300)",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    alone = commands.add_parser(
        "lighthouse", help="run the lighthouse alone; members set LIVE_LIGHTHOUSE",
        description="Where do members that are started one by one find each other?",
        epilog="example: python -m xla_replica.members lighthouse --bind 0.0.0.0:29510",
    )  # fmt: skip
    alone.add_argument(
        "--bind", default="127.0.0.1:29510", metavar="HOST:PORT",
        help="where to listen; 0.0.0.0 for all interfaces (default: %(default)s)",
    )  # fmt: skip
    run = commands.add_parser(
        "run", help="run a script as several members, and start anew those that die",
        description="How does a script run as several members of this machine?",
        epilog="example: python -m xla_replica.members run --members 3 train.py",
    )  # fmt: skip
    run.add_argument("--members", type=int, default=2, metavar="N", help="default: 2")
    run.add_argument(
        "script", nargs=argparse.REMAINDER, help="a Python script and its arguments"
    )
    options = parser.parse_args(arguments)
    times = options.heartbeat_seconds, options.patience
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.command == "lighthouse":
        with lighthouse(options.bind, *times) as address:
            logger.info(f"members of this run set LIVE_LIGHTHOUSE={address}")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
        return
    if options.members < 1 or not options.script:
        parser.error("run needs --members of at least 1, and a script")
    with lighthouse("127.0.0.1:0", *times) as address:
        variables = {
            "LIVE_LIGHTHOUSE": address,
            "LIVE_HEARTBEAT_SECONDS": str(options.heartbeat_seconds),
            "LIVE_PATIENCE_SECONDS": str(options.patience),
            "LIVE_TOKEN": os.environ.get("LIVE_TOKEN") or secrets.token_hex(16),
        }
        texts = " ".join(f"{name}={value}" for name, value in variables.items())
        logger.info(f"another member: {texts} python {' '.join(options.script)}")
        sys.exit(keep_running(options.script, options.members, variables))


def keep_running(
    script: Sequence[str], num_members: int, variables: dict[str, str]
) -> int:
    """Runs members until all have ended; returns the exit status.

    One that was asked to leave (143, 130) is not replaced, nor is any once one has
    ended well. One that has died is, after twice as long each time that a member dies
    at once. Nobody is any more if that happens again and again and none is left.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # members end with it
    environment = {**os.environ, **variables}
    command = [sys.executable, *script]
    running: dict[subprocess.Popen[bytes], float] = {}

    def start() -> None:
        running[subprocess.Popen(command, env=environment)] = time.monotonic()

    for _ in range(num_members):
        start()
    is_over, num_failures = False, 0  # of early ones since another one
    due: list[float] = []  # when others are to start
    try:
        while running or due:
            time.sleep(_LOOK_SECONDS)
            while due and time.monotonic() >= min(due):
                due.remove(min(due))
                start()
            for member in [each for each in running if each.poll() is not None]:
                is_early = time.monotonic() - running.pop(member) < _STEADY_SECONDS
                status = member.returncode
                is_over |= status == 0
                if is_over:
                    due = []
                if is_over or status in _LEFT:
                    continue
                num_failures = num_failures + 1 if is_early else 0
                if not running and num_failures > num_members + _MOST_FAILURES:
                    logger.error(f"member {member.pid} and those before it have failed")
                    return status
                # The first ones at once, one for each member.
                doublings = max(0, num_failures - num_members)
                pause = min(2.0**doublings - 1, _LONGEST_PAUSE_SECONDS)
                logger.warning(
                    f"member {member.pid} has died ({status}): another one"
                    + (f" in {pause:g} s" if pause else "")
                )
                due.append(time.monotonic() + pause)
    except KeyboardInterrupt:
        return 130
    finally:
        for member in running:
            member.terminate()
        for member in running:
            try:
                member.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:  # it waits for others, perhaps
                member.kill()
    return 0
