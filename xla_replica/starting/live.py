"""Members of a live run: processes that find each other at a lighthouse.

Whoever starts them sets ``LIVE_LIGHTHOUSE`` in their environment; see
`xla_replica.members.supervisor` for a run on one machine.
"""

from __future__ import annotations

import os
from typing import Any

from xla_replica.backends.registry import DEVICES, Job, bound, register_backend
from xla_replica.backends.replica import LocalReplica, Replica
from xla_replica.errors import ReplicaError
from xla_replica.members.member_replica import MemberReplica
from xla_replica.members.membership import Membership
from xla_replica.starting import xla  # noqa: F401  its row first: the last is asked
from xla_replica.stopping import listening

# What members are told by their environment, beside LIVE_LIGHTHOUSE, as texts.
VARIABLES = {
    "LIVE_TOKEN": ("token", str),
    "LIVE_MIN_MEMBERS": ("min_members", int),
    "LIVE_HEARTBEAT_SECONDS": ("heartbeat_seconds", float),
    "LIVE_PATIENCE_SECONDS": ("patience", float),
    "LIVE_TIMEOUT_SECONDS": ("timeout", float),
}

_member: MemberReplica | None = None  # this process's


def _find() -> str | None:
    address = os.environ.get("LIVE_LIGHTHOUSE")
    return None if address is None else f"LIVE_LIGHTHOUSE={address}"


def _replica(reason: str) -> MemberReplica:
    """Returns this process as a member, always the same one."""
    global _member
    if _member is None:
        options: dict[str, Any] = {}
        for name, (option, kind) in VARIABLES.items():
            if name in os.environ:
                try:
                    options[option] = kind(os.environ[name])
                except ValueError as error:
                    raise ReplicaError(
                        f"{name}={os.environ[name]!r}: {error}"
                    ) from error
        timeout = options.pop("timeout", 60.0)
        membership = Membership(os.environ["LIVE_LIGHTHOUSE"], **options)
        _member = MemberReplica(membership, _alone(), timeout)
    return _member


def _alone() -> Replica:
    """Returns the replica that this process would be without the others."""
    for name, backend in reversed(DEVICES.items()):
        reason = None if name == "live" else backend.find()
        if reason is not None:
            replica = backend.replica(reason)
            if replica.num_replicas > 1:
                raise ReplicaError(
                    f"this process is {replica}, and a member of a live run is one "
                    "process alone: start it without torchrun, or without "
                    "LIVE_LIGHTHOUSE"
                )
            return replica
    return LocalReplica()


def _launch(job: Job) -> list[Any]:
    """Runs a job in this process, which is the member that another one started."""
    if job.num_replicas not in (None, 1):
        raise ValueError(
            f"num_replicas={job.num_replicas}, but this process is one member of a "
            "live run (LIVE_LIGHTHOUSE): start as many processes"
        )
    with listening(), bound(_replica(_find() or "")):
        return [job.fn(0, *job.args)]


register_backend(
    "live",
    _find,
    _replica,
    _launch,
    preference=lambda job: 9 if _find() else 0,
    has_any_number=lambda: False,
)
