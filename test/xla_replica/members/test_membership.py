"""What a member knows of its own silence, and what it does then."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import types
import weakref
from datetime import timedelta

import pytest
import torch
from support.xla_replica.live_job import needs_lighthouse

import xla_replica
from xla_replica.members.member_replica import MemberReplica
from xla_replica.members.membership import Membership


@needs_lighthouse
def test_a_member_that_was_stopped_knows_it_whatever_has_been_summed():
    with xla_replica.lighthouse(heartbeat_seconds=0.5) as address:
        member = Membership(address, heartbeat_seconds=0.5)
        inner, seconds = member._client, iter([0.0, 0.8])

        def heartbeat(name: str, timeout: timedelta) -> None:
            time.sleep(next(seconds, 0.0))  # as if all of it had been stopped
            inner.heartbeat(name, timeout)

        member._client = types.SimpleNamespace(heartbeat=heartbeat, quorum=inner.quorum)
        member.agree(())
        assert not member.was_silent
        give_up = time.monotonic() + 10
        while not member.was_silent and time.monotonic() < give_up:
            member.note_together()
            time.sleep(0.01)
        assert member.was_silent
        member.agree((0, 0, 0))
        assert not member.was_silent
        member.leave()


AMID_HEARTBEAT = """
import sys, time, types
from xla_replica.members.membership import Membership

def heartbeat(name, timeout):
    print("begins", flush=True)
    time.sleep(0.5)
    print("ends", flush=True)

member = Membership(sys.argv[1])
quorum = member._client.quorum
member._client = types.SimpleNamespace(heartbeat=heartbeat, quorum=quorum)
member.agree(())
time.sleep(0.3)  # its first heartbeat has begun
"""


@needs_lighthouse
def test_python_ends_after_the_heartbeat_under_way():
    with xla_replica.lighthouse() as address:
        said = subprocess.check_output(
            [sys.executable, "-c", AMID_HEARTBEAT, address], text=True
        )
    assert said.split() == ["begins", "ends"]


def of_two(**membership) -> MemberReplica:
    """Returns a member that has met another one."""
    replica = MemberReplica(
        xla_replica.LocalReplica("cpu"),
        types.SimpleNamespace(host="127.0.0.1", **membership),
    )
    replica.met, replica._is_broken = types.SimpleNamespace(members="AB"), False
    return replica


def test_a_member_that_was_silent_begins_no_sum():
    replica = of_two(was_silent=True)
    with pytest.raises(xla_replica.MemberLost, match="was silent"):
        replica._wait("all_reduce_", lambda group: pytest.fail("it has begun"))


def test_a_member_does_not_wait_for_a_group_of_who_is_lost():
    """gloo can wait for ever for one that dies while it connects."""
    replica, dies = of_two(was_silent=False, has_lost=False), threading.Event()
    assert replica._made(lambda: 3) == 3
    with pytest.raises(RuntimeError, match="inconsistent"):
        replica._made(lambda: torch.ones(2) @ torch.ones(3))
    replica._membership.has_lost = True
    with pytest.raises(xla_replica.MemberLost, match="not heard of"):
        replica._made(dies.wait)
    dies.set()


class Work:
    """What hangs in a group until it has ended; here the group, too."""

    has_ended = False

    def wait(self, timeout: timedelta) -> bool:
        raise RuntimeError("not yet")

    def is_completed(self) -> bool:
        return self.has_ended


def test_a_group_in_which_something_hangs_is_freed_when_that_has_ended():
    replica = of_two(was_silent=False, has_lost=True)
    group, work = Work(), Work()
    replica._group, left = group, weakref.ref(group)
    with pytest.raises(xla_replica.MemberLost, match="not heard of"):
        replica._wait("all_reduce_", lambda group: work)
    del group
    for has_ended in (False, True):
        work.has_ended = has_ended
        replica._drop_group()
        gc.collect()
        assert (left() is None) == has_ended
