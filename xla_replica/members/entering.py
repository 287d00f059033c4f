"""Whether this process belongs to a member of a live run, as its environment says."""

from __future__ import annotations

import os

from xla_replica.backends.replica import Replica
from xla_replica.errors import ReplicaError
from xla_replica.members.member_replica import MemberReplica
from xla_replica.members.membership import LiveOptions, Membership


def as_member(replica: Replica) -> Replica:
    """Returns a replica as one of a member, if this process belongs to one.

    Collective over the replicas that sum without other members.
    """
    address = os.environ.get("LIVE_LIGHTHOUSE")
    if address is None or replica.is_live:
        return replica
    joined = sorted(name for name in os.environ if name.startswith("MEGASCALE_"))
    if joined:
        raise ReplicaError(
            f"{', '.join(joined)} join this slice with others in one runtime, and "
            "LIVE_LIGHTHOUSE makes it a member of a live run: unset one or the other",
            replica.rank,
        )
    options, membership = LiveOptions.of_environment(), None
    if replica.rank == 0:
        membership = Membership(address, options, replica.num_replicas)
    return MemberReplica(replica, membership, options)
