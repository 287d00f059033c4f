"""Wrappers on one replica, alone or with pretended peers that do as it does."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import SGD

import variable_batch_size as vbs
import xla_replica
from xla_replica import LocalReplica

CPU = LocalReplica("cpu")


class FakeReplica(LocalReplica):
    """Replica ``rank`` of several, whose peers bring the same tensors to every sum."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        super().__init__("cpu")
        self.rank, self.num_replicas = rank, num_replicas

    def all_reduce_(self, tensors) -> None:
        for tensor in tensors:
            tensor.mul_(self.num_replicas)

    def all_gather(self, tensor):
        return torch.stack([tensor.detach()] * self.num_replicas)


class CountingReplica(LocalReplica):
    """A replica that counts its transfers to the host."""

    num_fetches = 0

    def fetch(self, tensors):
        self.num_fetches += 1
        return super().fetch(tensors)


def sampler_of(trace=(64, 96, 96), size=256, **options) -> vbs.CustomSampler:
    """Returns the sampler of one replica, in minibatches of 32."""
    common = {"dataset_size": size, "num_replicas": 1, "rank": 0, "verbose": False}
    return vbs.CustomSampler(trace=trace, **common | options)


def minibatches(sampler, optimizer=None) -> Iterator[list[int]]:
    """Yields what a sampler deals, epoch after epoch, set on an optimizer, too."""
    epoch = sampler.epoch
    while epoch < sampler.num_epochs:
        sampler.set_epoch(epoch)
        if optimizer is not None:
            optimizer.set_epoch(epoch)
        yield from sampler
        epoch += 1


def make(
    trace=(64, 96, 96), inner=SGD, cls=vbs.LinearRuleOptimizer, rank=0, replicas=1,
    lr=0.1, replica=None, pads=False, exact=False, **options,
):  # fmt: skip
    """Returns model, sampler and wrapper: 256 samples in minibatches of 32.

    The wrapper's ``minibatches`` are those of the sampler, to be taken one by one.
    """
    replica = replica or FakeReplica(rank, replicas)
    model = nn.Linear(2, 1).to(replica.device)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    place = {"rank": replica.rank, "num_replicas": replica.num_replicas}
    place |= {"dataset": range(256), "dataset_size": None}
    sampler = sampler_of(trace, pad_minibatches=pads, **place)
    options = {"ref_batchsize": 32, "replica": replica} | options
    options |= {"exact": model} if exact else {}
    wrapper = cls(inner(model.parameters(), lr), sampler, **options)
    wrapper.minibatches = minibatches(sampler)
    return model, sampler, wrapper


def one_weight(
    trace, rule="constant", inner=SGD, size=8, minibatch_size=4, numbers=3, lr=0.5,
    sampler=None, **options,
):  # fmt: skip
    """Returns a weight of ones, and a sampler and a wrapper where they are called."""
    weight = nn.Parameter(torch.ones(numbers, device=xla_replica.current().device))
    of_sampler = {"minibatch_size": minibatch_size, "verbose": False} | (sampler or {})
    sampler = vbs.CustomSampler(range(size), trace, **of_sampler)
    wrapper = vbs.ElasticOptimizer(inner([weight], lr), sampler, rule, **options)
    return weight, sampler, wrapper


def idle_replica(rank: int = 1):
    """Returns one of 2, of which the second is idle in steps 0, 2, 3 and 5."""
    return make(trace=[32, 64, 32, 32, 64, 32], rank=rank, replicas=2)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    """Runs a minibatch whose gradient is ``scale`` everywhere."""
    (scale * model(torch.ones(1, 2, device=model.weight.device)).sum()).backward()


def run_epoch(model, sampler, wrapper) -> list[int]:
    returned = []
    for _ in sampler:
        backward(model)
        returned.append(wrapper.step())
    return returned
