"""Whether this process belongs to a member of a live run, as its environment says."""

from __future__ import annotations

import os
from typing import Any

from xla_replica.backends.replica import Replica
from xla_replica.errors import ReplicaError
from xla_replica.members.member_replica import MemberReplica
from xla_replica.members.membership import Membership

# What members are told beside LIVE_LIGHTHOUSE, as texts.
VARIABLES = {
    "LIVE_TOKEN": ("token", str),
    "LIVE_MIN_MEMBERS": ("min_members", int),
    "LIVE_HEARTBEAT_SECONDS": ("heartbeat_seconds", float),
    "LIVE_PATIENCE_SECONDS": ("patience", float),
    "LIVE_TIMEOUT_SECONDS": ("timeout", float),
    "LIVE_INTERFACE": ("interface", str),
}


def lighthouse_address() -> str | None:
    """Returns the address of the lighthouse at which this member meets the others."""
    return os.environ.get("LIVE_LIGHTHOUSE")


def as_member(replica: Replica) -> Replica:
    """Returns a replica as one of a member, if this process belongs to one.

    Collective over the replicas that sum without other members.
    """
    address = lighthouse_address()
    if address is None or replica.is_live:
        return replica
    joined = sorted(name for name in os.environ if name.startswith("MEGASCALE_"))
    if joined:
        raise ReplicaError(
            f"{', '.join(joined)} join this slice with others in one runtime, and "
            "LIVE_LIGHTHOUSE makes it a member of a live run: unset one or the other",
            replica.rank,
        )
    options = _options()
    timeout, patience = options.pop("timeout", 60.0), options.get("patience", 300.0)
    membership = None
    if replica.rank == 0:
        number = replica.num_replicas
        membership = Membership(address, num_replicas=number, **options)
    return MemberReplica(replica, membership, timeout, patience)


def _options() -> dict[str, Any]:
    """Returns what the environment says of members; raises ReplicaError if it errs."""
    options: dict[str, Any] = {}
    for name, (option, kind) in VARIABLES.items():
        if name in os.environ:
            try:
                options[option] = kind(os.environ[name])
            except ValueError as error:
                raise ReplicaError(f"{name}={os.environ[name]!r}: {error}") from error
    return options
