"""Members of a live run: processes that find each other at a lighthouse.

Whoever starts them sets ``LIVE_LIGHTHOUSE`` in their environment; see
`xla_replica.members.supervisor` for a run on one machine. What `launch` starts in such
a process is one member, be it a replica or a slice of several.
"""

from __future__ import annotations

import os

import torch

from xla_replica.backends.local import LocalReplica
from xla_replica.backends.registry import found_replica, register_backend
from xla_replica.backends.replica import Replica
from xla_replica.members.member_replica import as_member
from xla_replica.starting import xla  # noqa: F401  its row first: the last is asked

_found: dict[torch.device, Replica] = {}  # the same one, whichever thread asks


def _find() -> str | None:
    address = os.environ.get("LIVE_LIGHTHOUSE")
    return None if address is None else f"LIVE_LIGHTHOUSE={address}"


def _replica(reason: str) -> Replica:
    """Returns the caller, which nobody has launched, as a replica of a member."""
    inner = found_replica(but_by="live") or LocalReplica()
    if inner.device not in _found:
        _found[inner.device] = as_member(inner)
    return _found[inner.device]


register_backend("live", _find, _replica)
