"""What members of a live run are told, by their environment."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from xla_replica.errors import ReplicaError


class LiveOptions(NamedTuple):
    """Each of these is the variable ``LIVE_`` and its name, where that is set.

    Attributes:
        token: A text that all members of the run know.
        min_members: How many must be there for training to go on.
        heartbeat_seconds: After how long a member that is not heard of counts as dead:
            the lighthouse's own option, which must be the same.
        patience_seconds: For the others, where members meet.
        timeout_seconds: How late a living member may be at a collective.
        interface: The network interface by which others reach this member, such as
            ``eth1``; by default the one that leads to the lighthouse.
    """

    token: str = ""
    min_members: int = 1
    heartbeat_seconds: float = 1.0
    patience_seconds: float = 300.0
    timeout_seconds: float = 60.0
    interface: str = ""

    @classmethod
    def of_environment(cls) -> LiveOptions:
        """Returns what the environment says; raises ReplicaError if it errs."""
        told: dict[str, Any] = {}
        for option, default in cls._field_defaults.items():
            text = os.environ.get(name := f"LIVE_{option.upper()}")
            try:
                told[option] = default if text is None else type(default)(text)
            except ValueError as error:
                raise ReplicaError(f"{name}={text!r}: {error}") from error
        return cls(**told)


DEFAULTS = LiveOptions()
