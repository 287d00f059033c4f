"""Where emulated replicas wait for each other before a graph that holds a collective.

XLA:CPU aborts the process, without a Python exception, when a replica is 15 s late
at a collective. So replicas meet in Python first: they compare what they are about to
run, none is let through until all have come, and every way of failing becomes a
`ReplicaError` that names the replica, the collective and the cause.
"""

from __future__ import annotations

import itertools
import sys
import textwrap
import threading
import traceback
from collections.abc import Collection, Sequence

from xla_replica.errors import ReplicaError

# What a replica that has returned brings in place of collectives.
_END = "the end of its run"


def shown(call: str) -> str:
    """Returns a collective's name, dtypes and shapes, or the first of them, to read."""
    return textwrap.shorten(call, 200, placeholder=" ...)")


class Rendezvous:
    """Lets replica threads through when all of them have come with equal collectives.

    The first to come waits ``timeout`` seconds for the last. Nobody comes to the next
    meeting before all have dispatched the graph of this one.

    Attributes:
        num_dispatched: How many have since they last met. The lock around compilation
            guards it.
        all_dispatched: Is set when all have.
    """

    def __init__(self, num_replicas: int, timeout: float) -> None:
        self.num_replicas = num_replicas
        self.timeout = timeout
        self._barrier = threading.Barrier(num_replicas, self._begin_round, timeout)
        # By rank: the calls of collectives that it has traced, and not run.
        self._arrived: dict[int, tuple[str, ...]] = {}
        self._threads: dict[int, int] = {}
        self._error: ReplicaError | None = None  # what all raise, if they disagree
        self.num_dispatched, self.all_dispatched = 0, threading.Event()

    def enter(self, rank: int) -> None:
        """Registers the calling thread as replica ``rank``."""
        self._threads[rank] = threading.get_ident()

    def leave(self, rank: int) -> None:
        """Blocks until all replicas have returned as ``rank`` has; raises if not."""
        self.meet(rank, [_END])

    def meet(self, rank: int, collectives: Sequence[str]) -> None:
        """Blocks until every replica has come, and raises unless they agree."""
        if not self._barrier.broken:  # else it is late
            self._arrived[rank] = tuple(collectives)
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise self._late() from None
        if self._error is not None:
            raise self._error

    def _begin_round(self) -> None:
        """Compares what all have brought; the last to come does, for all."""
        self._error, self._arrived = _disagreement(self._arrived), {}
        self.num_dispatched = 0
        self.all_dispatched.clear()

    def _late(self) -> ReplicaError:
        """Returns the error that names the late replicas, with their stacks."""
        arrived = dict(self._arrived)
        late = sorted(set(range(self.num_replicas)) - set(arrived))
        stacks = [f"{_name([r])} is at:\n{_stack(self._threads.get(r))}" for r in late]
        return ReplicaError(
            f"{_name(late)} did not reach {_first(arrived)} within "
            f"{self.timeout:g} s of {_name(arrived)}. If one is only slow, raise "
            "launch(timeout=): docs/xla_replica.md#replicas-on-a-cpu.\n"
            + "\n".join(stacks),
            min(late, default=None),
        )


def _disagreement(arrived: dict[int, tuple[str, ...]]) -> ReplicaError | None:
    """Returns the error if the replicas are about to run different collectives."""
    gone = [rank for rank in arrived if arrived[rank] == (_END,)]
    waiting = {rank: brought for rank, brought in arrived.items() if rank not in gone}
    if gone and waiting:
        return ReplicaError(
            f"{_name(gone)} returned while {_name(waiting)} wait in {_first(waiting)}: "
            "on all, loops must end together, and no exception may be swallowed",
            min(gone),
        )
    by_rank = [arrived[rank] for rank in range(len(arrived))]
    columns = itertools.zip_longest(*by_rank, fillvalue="nothing")
    for number, brought in enumerate(columns, start=1):
        # The rarest call comes first: who brings it is most likely the one at fault.
        calls = sorted(dict.fromkeys(brought), key=brought.count)
        if len(calls) > 1:
            ranks = [[r for r, each in enumerate(brought) if each == c] for c in calls]
            parties = "; ".join(f"{_name(r)}: {shown(c)}" for r, c in zip(ranks, calls))
            return ReplicaError(
                f"replicas disagree about collective {number} of the graph they are "
                f"about to run: {parties}. They must run the same ones, on tensors of "
                "the same shapes and dtypes: docs/xla_replica.md#replicas-on-a-cpu",
                ranks[0][0],
            )
    return None


def _first(arrived: dict[int, tuple[str, ...]]) -> str:
    """Returns the collectives of the first replica that has some, in words."""
    return ", ".join(map(shown, arrived[min(arrived)]))


def _name(ranks: Collection[int]) -> str:
    """Returns "replica 2" or "replicas 0, 1"."""
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"replica {numbers}" if len(ranks) == 1 else f"replicas {numbers}"


def _stack(thread: int | None) -> str:
    """Returns the innermost frames of a thread, as a traceback shows them."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    if frame is None:
        return "  (its thread is not running)\n"
    return "".join(traceback.format_stack(frame)[-6:])
