"""What the environment says of members: what is refused, and by which names."""

from __future__ import annotations

import pytest

import xla_replica
from xla_replica.members.entering import as_member


def test_without_a_lighthouse_a_replica_is_itself():
    replica = xla_replica.LocalReplica("cpu")
    assert as_member(replica) is replica


def test_slices_that_one_runtime_has_joined_are_no_members(monkeypatch):
    monkeypatch.setenv("LIVE_LIGHTHOUSE", "http://127.0.0.1:1")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    with pytest.raises(xla_replica.ReplicaError, match="MEGASCALE_NUM_SLICES"):
        as_member(xla_replica.LocalReplica("cpu"))


def test_a_variable_that_is_not_a_number_is_named(monkeypatch):
    monkeypatch.setenv("LIVE_LIGHTHOUSE", "http://127.0.0.1:1")
    monkeypatch.setenv("LIVE_MIN_MEMBERS", "two")
    with pytest.raises(xla_replica.ReplicaError, match="LIVE_MIN_MEMBERS='two'"):
        as_member(xla_replica.LocalReplica("cpu"))
