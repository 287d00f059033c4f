"""The one exception that says a replica, or the meeting of replicas, has failed."""

from __future__ import annotations


class ReplicaError(RuntimeError):
    """A replica raised, hung, left early or disagreed with its peers.

    The message names the replica, the collective and the cause. Where one
    replica's own exception is the cause it is ``__cause__``, and ``rank`` is that
    replica's.

    Attributes:
        rank: The replica at fault; None where no single one is.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self):
        return type(self), (self.args[0], self.rank)
