"""Two members of a live run that are slices, whose replicas run one function."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import xla_replica
from xla_replica.starting import child_process


def run(sizes: tuple[int, ...], fn: Callable[..., Any], args: tuple) -> list[Any]:
    """Returns ``fn(rank, *args)`` of all replicas, by rank, once members have met."""
    context = child_process._context("forkserver")
    with xla_replica.lighthouse(heartbeat_seconds=10.0) as address:
        told = {
            "LIVE_LIGHTHOUSE": address,
            "LIVE_MIN_MEMBERS": str(len(sizes)),
            "LIVE_HEARTBEAT_SECONDS": "10",
        }
        results, members = [], []
        for size in sizes:
            receiver, sender = context.Pipe(duplex=False)
            arguments = told, size, fn, args, sender
            process = context.Process(target=_be_member, args=arguments)
            process.start()
            sender.close()
            members.append((process, receiver))
        for process, receiver in members:
            results += pickle.loads(receiver.recv_bytes())
            process.join()
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


def _be_member(
    told: dict[str, str],
    size: int,
    fn: Callable[..., Any],
    args: tuple,
    sender: Connection,
) -> None:
    os.environ.update(told)
    results = xla_replica.launch(_meet, (fn, args), size, "cpu")
    sender.send_bytes(pickle.dumps(results))  # whole, since this process ends


def _meet(rank: int, fn: Callable[..., Any], args: tuple) -> tuple[int, Any]:
    replica = xla_replica.current()
    replica.change(())
    return replica.rank, fn(replica.rank, *args)
