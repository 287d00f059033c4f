"""What a member knows of its own silence, and what it does then."""

import gc
import logging
import threading
import time
import traceback
import weakref
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support.scripts import python
from support.xla_replica.live_job import needs_lighthouse
from support.xla_replica.replicas import of_torch_alone

from xla_replica import LocalReplica, MemberLost, ReplicaError, Stopped, lighthouse
from xla_replica.members import membership
from xla_replica.members.member_replica import MemberReplica
from xla_replica.members.membership import LiveOptions, Membership
from xla_replica.stopping import StopRequest


@needs_lighthouse
def test_a_member_that_was_stopped_knows_it_whatever_has_been_summed(monkeypatch):
    from torchft.coordination import LighthouseClient as Client

    heartbeat, seconds = Client.heartbeat, iter([0.0, 0.8])

    def slow(client: Client, name: str, timeout: timedelta) -> None:
        time.sleep(next(seconds, 0.0))  # as if all of it had been stopped
        heartbeat(client, name, timeout)

    monkeypatch.setattr(Client, "heartbeat", slow)
    with lighthouse(heartbeat_seconds=0.5) as address:
        member = Membership(address, LiveOptions(heartbeat_seconds=0.5))
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


@needs_lighthouse
@pytest.mark.parametrize("was_silent", [True, False])
def test_who_was_silent_or_has_not_joined_tells_the_others_to_meet(was_silent):
    options = LiveOptions(heartbeat_seconds=0.5, min_members=2)
    with lighthouse(heartbeat_seconds=0.5) as address, ThreadPool(2) as pool:
        one, other = members = [Membership(address, options) for _ in range(2)]
        for has_met in (False, True):
            meets = pool.apply_async(one.agree, [(1, 0, 0) if has_met else ()])
            while has_met and not other.has_lost:
                time.sleep(0.01)
            assert len(other.agree((1, 0, 0)).members) == len(meets.get().members) == 2
            assert not other.has_lost
            other.note_together()
            if was_silent:
                one.note_together()
                one.was_silent = True
        for member in members:
            member.leave()


@needs_lighthouse
@of_torch_alone
def test_after_who_has_joined_and_gone_others_wait_twice_as_long():
    seconds = []
    with lighthouse() as address, ThreadPool(2) as pool:
        old = Membership(address)
        old.agree((4, 0, 0))
        for _ in range(3):
            since, new = time.monotonic(), Membership(address)
            joins = pool.apply_async(new.agree, [()])
            while not old.someone_waits:
                time.sleep(0.01)
            seconds.append(time.monotonic() - since)
            assert len(old.agree((4, 0, 0)).members) == 2
            joins.get()
            leaves = pool.apply_async(new.agree, [(4, 0, 0)], {"leaves": True})
            assert len(old.agree((4, 0, 0)).members) == 1
            leaves.get()
            new.leave()
        old.leave()
    assert 0.9 <= seconds[1] <= seconds[2] - 0.9, seconds  # since it was told


@needs_lighthouse
@of_torch_alone
def test_who_needs_others_waits_for_them_or_until_it_is_to_stop(caplog, monkeypatch):
    def waits() -> None:
        caplog.clear()
        while caplog.text.count("there are 1, and training needs 2") < 3:
            time.sleep(0.01)

    def stop() -> None:
        waits()
        request = StopRequest("maintenance", 75)
        monkeypatch.setattr(membership, "stop_requested", lambda: request)

    options = LiveOptions("", 2, heartbeat_seconds=0.5, patience_seconds=1.0)
    with lighthouse(heartbeat_seconds=0.5) as address, ThreadPool(2) as pool:
        one, other = (Membership(address, options) for _ in range(2))
        joins = pool.apply_async(one.agree, [()])
        waits()
        assert len(other.agree(()).members) == len(joins.get().members) == 2
        other.leave()
        stops = pool.apply_async(stop)
        with pytest.raises(Stopped, match="maintenance"):
            one.agree((1, 0, 0))
        stops.get()


AMID_HEARTBEAT = """
import sys, time
from torchft.coordination import LighthouseClient
from xla_replica.members.membership import Membership

def heartbeat(client, name, timeout):
    print("begins", flush=True)
    time.sleep(0.5)
    print("ends", flush=True)

LighthouseClient.heartbeat = heartbeat
Membership(sys.argv[1]).agree(())
time.sleep(0.3)  # its first heartbeat has begun
"""


@of_torch_alone
@needs_lighthouse
def test_python_ends_after_the_heartbeat_under_way():
    with lighthouse() as address:
        assert python("-c", AMID_HEARTBEAT, address).stdout == "begins\nends\n"


@needs_lighthouse
def test_an_interface_chooses_the_address_and_is_refused_by_name_if_there_is_none():
    with lighthouse() as address:
        assert Membership(address, LiveOptions(interface="lo")).host == "127.0.0.1"
        with pytest.raises(ReplicaError, match="'eth77' has no IPv4 address"):
            Membership(address, LiveOptions(interface="eth77"))


def of_two(was_silent: bool = False, has_lost: bool = False) -> MemberReplica:
    """Returns a member that has met another one."""
    told = {"store_address": "", "was_silent": was_silent, "has_lost": has_lost}
    replica = MemberReplica(LocalReplica("cpu"), SimpleNamespace(**told), LiveOptions())
    replica.met = SimpleNamespace(members="AB")
    return replica


def test_shards_on_an_accelerator_are_refused(monkeypatch):
    replica = of_two()
    monkeypatch.setattr(MemberReplica, "is_host", False)
    replica.is_sharded = lambda parameters: True
    with pytest.raises(TypeError, match="compute on CPUs so far"):
        replica.gradient_sum(lambda: True)


def test_what_gloo_says_of_a_loss_is_in_the_debug_log_alone(caplog):
    """Its text was in the message, in the cause and in the log."""
    caplog.set_level(logging.DEBUG)
    replica, text = of_two(), "[/gloo/pair.cc:534] Connection closed by peer"
    work = Mock(wait=Mock(side_effect=RuntimeError(text)), is_completed=lambda: True)
    replica._group = SimpleNamespace(allreduce=lambda *_: work)
    with pytest.raises(MemberLost, match="a connection has ended") as lost:
        replica.all_reduce_([torch.ones(1)])
    assert text not in "".join(traceback.format_exception(lost.value))
    [record] = [each for each in caplog.records if text in each.message]
    assert record.levelno == logging.DEBUG


def test_a_sum_that_cannot_begin_is_a_loss_where_it_is_waited_for():
    """Not in the backward pass, which begins it."""
    replica = of_two()
    replica._group = Mock(allreduce=Mock(side_effect=RuntimeError("no connection")))
    wait = replica.begin_sum(torch.ones(1))
    with pytest.raises(MemberLost, match="all_reduce_"):
        wait()


def test_a_member_does_not_wait_for_a_group_of_who_is_lost():
    """gloo can wait for ever for one that dies while it connects."""
    dies = threading.Event()
    with pytest.raises(RuntimeError, match="inconsistent"):
        of_two()._made(lambda: torch.ones(2) @ torch.ones(3))
    with pytest.raises(ZeroDivisionError):  # whatever it is
        of_two()._made(lambda: 1 / 0)
    with pytest.raises(MemberLost, match="not heard of"):
        of_two(has_lost=True)._made(dies.wait)
    dies.set()


def test_a_group_in_which_something_hangs_is_freed_when_that_has_ended():
    work = Mock(wait=Mock(side_effect=RuntimeError), is_completed=lambda: False)
    replica = of_two(has_lost=True)
    replica._group = type("Group", (), {"allreduce": lambda *_: work})()
    left = weakref.ref(replica._group)
    with pytest.raises(MemberLost, match="not heard of"):
        replica.all_reduce_([torch.ones(1)])
    for has_ended in (False, True):
        work.is_completed = lambda has_ended=has_ended: has_ended
        replica._drop_group()
        gc.collect()
        assert (left() is None) == has_ended
