"""The exceptions that end a run, or what its members do together."""

from __future__ import annotations

from xla_replica.stopping import check_stop


class ReplicaError(RuntimeError):
    """A replica raised, hung, left early or disagreed with its peers.

    The message names the replica, the collective and the cause. If the cause is an
    exception that one replica raised, it is ``__cause__``.

    Args:
        message: What ends the run, for people.
        rank: The replica at fault; None if no single one is.

    Attributes:
        rank: The replica at fault; None if no single one is.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class MemberLost(ReplicaError):
    """A member of a live run has died, hangs or has left, in a collective.

    The others meet, and do together once more what they were at. `ElasticOptimizer`
    sees to that in its steps, and in the functions that are attached to it.
    """


class Superseded(ReplicaError):
    """The others have gone on without this member, so it must not write anything."""


class Stopped(SystemExit):
    """The run was asked to stop, has saved everything, and stops.

    A replica that raises it ends well. Raise it on every replica after the same update;
    `launch` waits for all of them and raises it in its caller. If it is not caught, the
    script exits with ``exit_status``.

    Attributes:
        reason: Why, for people.
        exit_status: 0 to 255; 143 is that of a process that SIGTERM ended.

    Raises:
        TypeError, ValueError: ``reason`` is not a string, or ``exit_status`` is not an
            integer from 0 to 255.
    """

    def __init__(self, reason: str, exit_status: int = 143) -> None:
        check_stop(reason, exit_status)
        super().__init__(exit_status)
        self.reason = reason
        self.exit_status = exit_status

    def __str__(self) -> str:
        return self.reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reason, self.exit_status)
