"""Backends from outside the package: `current` finds them and `launch` starts them."""

import threading

import pytest
import torch
from support.documents import block

import xla_replica
from xla_replica import ReplicaError


@pytest.fixture
def threads():
    """The names of the page's backend, whose replicas are threads."""
    before, names = dict(xla_replica.DEVICES), {}
    exec(block("docs/extending.md", "python", "ThreadReplica"), names)
    yield names
    xla_replica.DEVICES.clear()
    xla_replica.DEVICES.update(before)


def every_collective(rank: int, offset: int) -> None:
    replica = xla_replica.current()
    sums = [torch.full((2,), float(rank)), torch.tensor(offset + rank)]
    replica.all_reduce_(sums)
    sent = [torch.tensor([rank, offset])]
    replica.broadcast_(sent, source=2)
    replica.barrier()
    with pytest.raises(ReplicaError, match="about the seed: replica 0 has 0"):
        replica.check_agreement("the seed", replica.rank, "Pass the same seed.")
    received = replica.all_to_all(10 * torch.arange(3) + rank)
    assert [tensor.tolist() for tensor in sums] == [[3.0, 3.0], 3 * offset + 3]
    assert sent[0].tolist() == [2, offset]
    assert received.tolist() == [10 * rank, 10 * rank + 1, 10 * rank + 2]
    assert replica.all_gather_object({rank: rank}) == [{r: r} for r in range(3)]
    assert str(replica) == f"replica {rank} of 3 on cpu (a thread)"


def test_all_verbs_follow_from_all_gather(threads):
    assert xla_replica.launch(every_collective, (5,), 3, "threads") == [None] * 3


def test_an_all_gather_without_the_dimension_of_replicas_is_an_error(threads):
    """Sums and broadcasts of what it returns have the right shape and other numbers."""

    class WithoutReplicas(threads["ThreadReplica"]):
        def all_gather(self, tensor):
            return super().all_gather(tensor).flatten(0, 1)

    tensor = torch.ones(2, 3)
    replica = WithoutReplicas(0, [None, tensor], threading.Barrier(1))
    says = (
        r"WithoutReplicas\.all_gather must return a tensor of shape \(num_replicas, "
        r"\*tensor\.shape\), here \(2, 2, 3\), got one of shape \(4, 3\)"
    )
    for collective, *arguments in (
        (replica.all_gather, tensor), (replica.all_reduce_, [tensor]),
        (replica.broadcast_, [tensor]), (replica.all_to_all, tensor),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            collective(*arguments)


def test_a_backend_from_outside_is_used_only_if_it_is_asked_for(threads):
    assert "threads" in xla_replica.DEVICES
    [place] = xla_replica.launch(lambda rank: str(xla_replica.current()), device="cpu")
    assert "launched alone" in place
    assert xla_replica.default_num_replicas("threads", on_cpu=7) == 7


def test_a_backend_without_launch_is_found_but_cannot_be_launched(threads):
    local = xla_replica.LocalReplica("cpu", "found by a test")
    xla_replica.register_backend("found", lambda: "a test", lambda reason: local)
    assert xla_replica.current() is local
    with pytest.raises(ValueError, match=r"device must be one of .* got 'found'"):
        xla_replica.launch(every_collective, device="found")


def test_a_kind_of_device_has_the_traits_that_were_registered(monkeypatch):
    monkeypatch.setattr("xla_replica.device.device_traits._TRAITS", {})
    meta = torch.ones(1, device="meta")
    assert xla_replica.traits(meta) == xla_replica.DeviceTraits()
    xla_replica.register_device("meta", xla_replica.DeviceTraits(is_lazy=True))
    for each in (meta, meta.device):
        assert xla_replica.traits(each).is_lazy
    assert xla_replica.LocalReplica("meta").is_lazy
