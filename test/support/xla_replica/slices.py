"""Two members of a live run that are slices, whose replicas run one function."""

import functools
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import xla_replica
from xla_replica.starting import child_process


def run(sizes: tuple[int, ...], fn: Callable[..., Any], args: tuple) -> list[Any]:
    """Returns ``fn(rank, *args)`` of all replicas, by rank, once members have met."""
    context, results = child_process._context("forkserver"), {}
    with xla_replica.lighthouse(heartbeat_seconds=10.0) as address:
        told = {
            "LIVE_LIGHTHOUSE": address,
            "LIVE_MIN_MEMBERS": str(len(sizes)),
            "LIVE_HEARTBEAT_SECONDS": "10",
        }
        with ProcessPoolExecutor(len(sizes), context) as members:
            of_member = functools.partial(_be_member, told, fn, args)
            for found in members.map(of_member, sizes):
                results.update(pickle.loads(found))
    return [results[rank] for rank in sorted(results)]


def _be_member(told: Any, fn: Callable[..., Any], args: tuple, size: int) -> bytes:
    os.environ.update(told)
    results = xla_replica.launch(_meet, (fn, args), size, "cpu")
    return pickle.dumps(results)  # whole, since this process ends


def _meet(rank: int, fn: Callable[..., Any], args: tuple) -> tuple[int, Any]:
    replica = xla_replica.current()
    replica.change(())
    return replica.rank, fn(replica.rank, *args)
