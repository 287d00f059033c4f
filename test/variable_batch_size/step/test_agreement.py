"""Replicas agree on when to stop, at whatever moments asked, and on their settings."""

from __future__ import annotations

import os
import signal
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from support.variable_batch_size.elastic import Case, Training
from support.variable_batch_size.wrapping import one_weight
from support.xla_replica import replicas

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.checkpoint.save_and_stop import agreed_request
from variable_batch_size.device_scalars import DeviceScalars
from variable_batch_size.live.members import LiveBallots
from variable_batch_size.step import parts

here = threading.local()  # the rank of the replica that a thread is


class ThreadReplica(xla_replica.Replica):
    """One of three on the CPU, in a thread, that behaves as one on another device."""

    is_host = has_streams = False

    def __init__(self, replicas: Replicas, rank: int, device: str) -> None:
        super().__init__(rank, 3, torch.device("cpu"), "a thread")
        self.is_host, self.replicas = device == "cpu", replicas

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.replicas.board[self.rank] = tensor.detach().clone()
        self.replicas.meeting.wait()  # all have written
        gathered = torch.stack(self.replicas.board)
        self.replicas.meeting.wait()  # all have read
        return gathered


class Replicas:
    """Three replicas that train, of which those ``asked`` are asked to stop.

    Their updates take so many ``seconds``, by the clock of each rank.
    """

    def __init__(self, monkeypatch, device, seconds=(0, 0, 0)):
        self.clocks, self.seconds = [0.0] * 3, seconds
        self.asked: set[int] = set()
        self.board, self.meeting = [None] * 3, threading.Barrier(3, timeout=60)
        self.reads: list[int] = []  # the ranks of those that have read the sum
        read = parts.Ballots.read_votes

        def counted(found):
            self.reads.append(here.rank)
            return read(found)

        clock = types.SimpleNamespace(monotonic=lambda: self.clocks[here.rank])
        monkeypatch.setattr(parts, "time", clock)
        monkeypatch.setattr(parts.Ballots, "read_votes", counted)
        monkeypatch.setattr(xla_replica, "stop_requested", self.request)
        replicas = [ThreadReplica(self, rank, device) for rank in range(3)]
        self.pool = ThreadPoolExecutor(3)
        self.training = list(self.pool.map(self.build, replicas))

    def build(self, replica: ThreadReplica):
        here.rank = replica.rank
        weight, sampler, optimizer = one_weight(
            3, replica=replica, size=2000, minibatch_size=1,
            sampler={"rank": replica.rank, "num_replicas": 3},
        )  # fmt: skip
        optimizer.set_epoch(0)
        return weight, optimizer, iter(sampler)

    def request(self) -> xla_replica.StopRequest | None:
        return xla_replica.StopRequest("test", 143) if here.rank in self.asked else None

    def update(self, look: bool = False, every_seconds: float = 1e9) -> list[bool]:
        def train(found) -> bool:
            weight, optimizer, minibatches = found
            here.rank = optimizer.replica.rank
            next(minibatches)
            weight.sum().backward()
            assert optimizer.step() == 1
            self.clocks[here.rank] += self.seconds[here.rank]
            return optimizer.asked_to_stop(look, every_seconds)

        return list(self.pool.map(train, self.training))


def test_on_accelerators_nobody_reads_until_asked(monkeypatch):
    replicas = Replicas(monkeypatch, "xla")
    # Before all are asked, those who are read the sum, and continue.
    for asked in ([], [0, 2]):
        replicas.asked = {*asked}
        assert replicas.update() == [False] * 3
        assert sorted(replicas.reads) == asked
    replicas.asked = {0, 1, 2}
    assert replicas.update() == [True] * 3


@pytest.mark.parametrize(("device", "look"), [("xla", True), ("cpu", False)])
def test_one_that_was_asked_alone_is_found_where_all_look(monkeypatch, device, look):
    replicas = Replicas(monkeypatch, device)
    assert replicas.update() == [False] * 3
    replicas.asked = {1}
    if device == "xla":
        assert replicas.update() == [False] * 3
    assert replicas.update(look) == [True] * 3


def test_each_looks_once_in_so_many_seconds_and_then_asks_too(monkeypatch):
    """By a clock of its own, which may be another one's; all stop at one update."""
    replicas = Replicas(monkeypatch, "xla", seconds=(0.25, 0.5, 0.125))
    for _ in range(160):
        assert replicas.update(every_seconds=2.0) == [False] * 3
    assert [replicas.reads.count(rank) for rank in range(3)] == [20, 40, 10]
    replicas.asked = {1}
    found = [replicas.update(every_seconds=2.0) for _ in range(17)]
    # The last one to look does so after 16 updates.
    assert found == [[False] * 3] * 16 + [[True] * 3]


def stops_for_one_reason(rank: int) -> None:
    if rank == 1:
        xla_replica.catch_signals()
        os.kill(os.getpid(), signal.SIGINT)
    if rank == 2:
        xla_replica.request_stop("maintenance", 75)
    request = agreed_request(xla_replica.current())
    assert request == xla_replica.StopRequest("received SIGINT", 130)
    raise xla_replica.Stopped(request.reason, request.exit_status)


@replicas.of_torch_alone
def test_all_replicas_stop_for_the_same_reason():
    with pytest.raises(xla_replica.Stopped, match="received SIGINT") as stopped:
        xla_replica.launch(stops_for_one_reason, (), 3, "cpu")
    assert stopped.value.code == 130


@pytest.mark.parametrize(
    "reason", ["Wartung läuft", "", "x" * 9999 + "ü", "a lone \udc80 surrogate"]
)
def test_a_reason_is_any_text(monkeypatch, reason):
    request = xla_replica.StopRequest(reason, 0)
    monkeypatch.setattr(xla_replica, "stop_requested", lambda: request)
    assert agreed_request(xla_replica.LocalReplica("cpu")) == (reason, 0)


class OfMember(xla_replica.LocalReplica):
    """A replica of a member that was not asked to stop; another one of it was."""

    is_live = True

    def in_member(self, value: bool) -> bool:
        return True


@pytest.mark.parametrize(("members", "leaves"), [("ab", True), ("a", False)])
def test_replicas_of_a_member_leave_together(monkeypatch, members, leaves):
    """The last member stops instead, once all its replicas vote."""
    asked: list[str] = []
    monkeypatch.setattr(xla_replica, "stop_requested", lambda: None)
    monkeypatch.setattr(xla_replica, "request_stop", asked.append)
    replica = OfMember("cpu")
    replica.met = types.SimpleNamespace(members=members)
    run = mock.MagicMock(replica=replica, scalars=DeviceScalars(replica))
    run.sampler.order_digest.return_value = None
    votes = LiveBallots(run, mock.MagicMock(), mock.MagicMock(), {})
    votes.prepare(mock.MagicMock(num_minibatches=3))
    [sums] = votes.tensors()
    sums.mul_(3)
    sums[4] = 1  # of three replicas
    votes.look()
    assert votes.change_agreed() == (leaves, leaves)
    assert asked == ["another replica of this member is to stop"]


# By setting: what all replicas have, what the last one has in its place, and what the
# message says where it does not show both.
SETTINGS = {
    "trace": ([8, 16, 8], [8, 8, 16], "'trace': '3 steps, sha256 "),
    "seed": (1, 2),
    "minibatch_size": (4, 2),
    "dataset_size": (64, 60, "{'num_samples': 64}, replica 2 has {'num_samples': 60}"),
    "on_end": ("stop", "cycle"),
    "order": (None, range(64), "'order': 'given'"),
    "rule": ("linear", "root"),
    "ref_batchsize": (8, 16),
    "max_grad_norm": (None, 1.0),
    "reduction": ("mean", "sum"),
    "noise": (False, True, "{'noise': None}, replica 2 has {'noise': NoiseOptions("),
    "momentum_correction": (False, True),
    "lr": (0.1, 0.2),
    "width": (3, 4, "{'parameters': '2 tensors of 4 numbers, "),
    "frozen": (False, True, "'parameters': '2 tensors of 4 numbers, sha256 "),
}


def construct(**given: Any) -> None:
    for_sampler = ("trace", "seed", "minibatch_size", "dataset_size", "on_end", "order")
    sampler = vbs.CustomSampler(**{name: given.pop(name) for name in for_sampler})
    model = torch.nn.Linear(given.pop("width"), 1).to(xla_replica.current().device)
    model.bias.requires_grad_(not given.pop("frozen"))
    inner = torch.optim.SGD(model.parameters(), given.pop("lr"), momentum=0.5)
    vbs.ElasticOptimizer(inner, sampler, **given)


def disagreements(rank: int) -> None:
    """Asserts what a replica is told where the last one differs."""
    last = xla_replica.current().num_replicas - 1
    same = {name: value for name, (value, *_) in SETTINGS.items()}
    for name, (value, other, *said) in SETTINGS.items():
        with pytest.raises(xla_replica.ReplicaError) as caught:
            construct(**same | ({name: other} if rank == last else {}))
        both = f"{{{name!r}: {value!r}}}, replica 2 has {{{name!r}: {other!r}}}"
        for words in (
            (*said, both)[0].replace("a 2", f"a {last}"),
            f", and 1 of {last + 1} differ",
            "build sampler, model and optimizer alike",
        ):
            assert words in str(caught.value)
        assert caught.value.rank == last
    construct(**same)  # all have raised, so they can go on together


@pytest.mark.parametrize(
    "backend", [*replicas.SEVERAL_REPLICAS, replicas.TPU_LIKE, replicas.FOUR_TPU_LIKE]
)
def test_settings_that_differ_are_named_at_construction(backend):
    backend.run(disagreements)


def train_in_order(rank: int, seeds: list[int]) -> int:
    """Trains two epochs in random orders of its own seed; returns its minibatches."""
    generator = torch.Generator().manual_seed(seeds[rank])
    order = torch.utils.data.RandomSampler(range(64), generator=generator)
    # The last replica joins the first step before it knows the epoch's order.
    case = Case((4, 24, 36), rule="constant", num_samples=64)
    training = Training(case, sampler={"order": order})
    for epoch in range(2):
        training.epoch(epoch)
        training.optimizer.average_buffers(training.model)
    return len(training.samples)


@pytest.mark.parametrize("backend", [*replicas.SEVERAL_REPLICAS, replicas.TPU_LIKE])
def test_orders_that_differ_are_found(backend):
    n = backend.num_replicas
    assert sum(backend.run(train_in_order, [7] * n)) == 32
    with pytest.raises(xla_replica.ReplicaError, match="differ in the order of an ep"):
        backend.run(train_in_order, [7] * (n - 1) + [8])


def train_partly(rank: int, frozen: list[bool], is_attached: bool) -> None:
    """Freezes a bias in mid-run, in a function that is attached or in the loop."""
    training = Training(Case((4, 24, 36), rule="adascale", num_samples=64))
    *_, bias = training.model.parameters()

    def freeze(*_: Any) -> None:
        bias.requires_grad_(not frozen[rank])

    if is_attached:
        training.optimizer.attach(freeze)
    training.epoch(0)
    freeze()
    training.epoch(1)


@pytest.mark.parametrize("is_attached", [True, False])
@replicas.of_torch_alone
def test_parameters_that_one_replica_alone_trains_are_found(is_attached):
    xla_replica.launch(train_partly, ([True] * 2, is_attached), 2, "cpu")
    for frozen in ([True, False], [False, True]):
        with pytest.raises(xla_replica.ReplicaError, match="or trained parameters"):
            xla_replica.launch(train_partly, (frozen, is_attached), 2, "cpu")
