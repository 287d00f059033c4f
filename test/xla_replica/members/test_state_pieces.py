"""A state comes in pieces from all members that have it, who wait for theirs alone."""

import time
from collections import Counter
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace

import pytest
import torch
from support.xla_replica.replicas import of_torch_alone

from xla_replica import LocalReplica, MemberLost
from xla_replica.common.trees import map_tensors, tensors_in
from xla_replica.members import host_group, state_pieces
from xla_replica.members.member_replica import MemberReplica
from xla_replica.members.membership import LiveOptions
from xla_replica.members.state_pieces import Pieces, deliveries

pytestmark = of_torch_alone
STATE = {
    "weights": torch.randn(300, 100).T,  # not contiguous
    "steps": [torch.tensor(7.0), torch.arange(9), torch.tensor([True])],
    "lr": 0.1,
    "halves": torch.randn(5000).bfloat16(),
    "none": torch.empty(0),
}
SIZE = sum(tensor.nbytes for tensor in tensors_in(STATE))


class Group:
    """A group that counts the bytes which its member sends, and may break."""

    def __init__(self, group, rank: int) -> None:
        self._group, self._rank = group, rank
        self.most, self.seconds = float("inf"), 0.0
        self.sent = Counter()

    def send(self, tensors, receiver, tag):
        time.sleep(self.seconds)
        if not self._group or self.sent.total() + len(tensors[0]) > self.most:
            self._group = None  # as if its process had died
            raise RuntimeError("died")
        self.sent[receiver] += tensors[0].numel()
        return self._group.send(tensors, receiver, tag)

    def broadcast(self, tensor, root):
        if root == self._rank and tensor.dtype == torch.uint8:
            self.sent["all"] += tensor.numel()
        return self._group.broadcast(tensor, root)

    def __getattr__(self, name):
        return getattr(self._group, name)


def connected(number: int) -> list[MemberReplica]:
    """Returns members of one generation, which threads of this process use."""
    store = torch.distributed.HashStore()
    told = {"store_address": "", "was_silent": False, "has_lost": False}

    def connect(member: int) -> MemberReplica:
        membership = SimpleNamespace(**told, note_together=lambda: None)
        replica = MemberReplica(LocalReplica("cpu"), membership, LiveOptions())
        replica.met, replica.member = SimpleNamespace(members=[*range(number)]), member
        group = host_group.connect(store, member, number, "127.0.0.1", 20.0)
        replica._group = Group(group, member)
        return replica

    return together(range(number), connect)


def together(members, function) -> list:
    with ThreadPool(len(members)) as pool:
        return pool.map(function, members, chunksize=1)


def receive(members, receivers, states) -> list:
    """Returns what each member has then, or the loss that it has met."""

    def share(replica: MemberReplica):
        own = states[replica.member]
        try:
            common, state = replica.share(replica.member, own, 0, receivers)
        except MemberLost as error:
            return str(error)
        assert common == 0
        return state

    return together(members, share)


def assert_same(found) -> None:
    torch.testing.assert_close(found, STATE, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(state_pieces, "PIECE_BYTES", 1000)


@pytest.mark.parametrize("num_senders", [2, 3])
def test_joiners_get_the_bits_and_every_member_sends_its_share(num_senders):
    joiners = [num_senders, num_senders + 1]
    members = connected(num_senders + 2)
    for found in receive(members, joiners, [STATE] * num_senders + [None] * 2):
        assert_same(found)
    share = pytest.approx(SIZE / num_senders, abs=2000)
    assert all(member._group.sent.total() / 2 == share for member in members[:-2])
    assert not members[-1]._group.sent


def test_what_a_member_has_otherwise_than_the_source_comes_from_the_others():
    differs = {**STATE, "halves": STATE["halves"] + 1}
    other_form = {**STATE, "more": torch.ones(3)}
    members = connected(4)
    *_, found = receive(members, [3], [STATE, differs, other_form, None])
    assert_same(found)
    first, second, third, _ = (member._group.sent.total() for member in members)
    assert first > second > 0 == third


def test_all_that_are_new_get_the_state_of_one():
    for found in receive(connected(3), [0, 1, 2], [STATE, None, None]):
        assert_same(found)


def test_a_member_waits_for_no_other_ones_part():
    members, seconds = connected(3), [0.0] * 3
    members[1]._group.seconds = 0.02

    def share(replica: MemberReplica) -> None:
        since, state = time.monotonic(), STATE if replica.member < 2 else None
        replica.share(None, state, 0, [2])
        seconds[replica.member] = time.monotonic() - since

    together(members, share)
    assert seconds[0] < seconds[1] / 2, seconds
    assert seconds[2] > seconds[1] / 2, seconds


@pytest.mark.parametrize("dies", [0, 1])
def test_a_sender_that_dies_costs_what_it_has_not_sent(dies):
    members = connected(3)
    members[dies]._group.most = SIZE / 4
    *_, problem = receive(members, [2], [STATE, STATE, None])
    assert "has lost another one in share" in problem
    stays, joiner = members[1 - dies], members[2]
    kept, sizes = joiner._pieces, joiner._pieces.sizes
    missing = sum(s for s, n in zip(sizes, kept.sums.tolist()) if n == -1)
    assert 0 < missing <= SIZE - stays._group.sent[2] < SIZE * 0.6
    again = connected(2)
    again[1]._pieces = kept
    _, found = receive(again, [1], [STATE, None])
    assert_same(found)
    outline = again[0]._group.sent["all"] - missing
    assert 0 < outline < 4000  # it has no numbers
    assert again[1]._pieces is None


def test_parts_are_about_equal_whatever_the_sizes_of_the_pieces():
    sizes = [1000, 10] * 20
    sums = torch.tensor([[5] * 40] * 2 + [[-1] * 40] * 2)
    sent = Counter()
    for piece, sender, receiver in deliveries(sums, 0, [2, 3], sizes):
        sent[sender, receiver] += sizes[piece]
    assert sent[0, 2] + sent[0, 3] == sent[1, 2] + sent[1, 3]
    assert deliveries(sums[:, :0], 0, [2, 3], []) == []


def test_pieces_that_came_are_kept_for_a_state_of_the_same_form_alone():
    whole, other = Pieces(STATE, STATE, True), {"a": torch.ones(9)}
    new = Pieces(other, other, False)
    new.keep(whole)
    assert new.sums.tolist() == [-1]
    assert Pieces(other, STATE, True).sums.unique().tolist() == [-1]
    assert not whole.sums.eq(-1).any()
    again = Pieces(map_tensors(STATE, torch.empty_like), STATE, False)
    again.keep(whole)
    assert again.sums.equal(whole.sums)
    assert all(map(torch.equal, again.content, whole.content))
