"""Averaged buffers: equal on all replicas, as good as a large-batch run's."""

import pytest
import torch
from support.variable_batch_size.elastic import Case, Training, batches
from support.xla_replica.replicas import SEVERAL_REPLICAS, Backend, row
from torch import nn
from torch.utils.data import DataLoader

import variable_batch_size as vbs
import xla_replica


class Buffers(nn.Module):
    def __init__(self, rank: int, weight: float) -> None:
        super().__init__()
        value = float(rank) if weight else float("nan")
        self.register_buffer("vector", torch.full((3,), value))
        self.register_buffer("scalar", torch.tensor(value))
        self.register_buffer("wide", torch.full((2,), value, dtype=torch.float64))
        self.register_buffer("narrow", torch.full((2,), value, dtype=torch.bfloat16))
        self.register_buffer("table", torch.tensor([0.1, 1 / 3, -3e38, -torch.inf]))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("empty", torch.zeros(0))


def averaged(rank: int) -> list[list[torch.Tensor]]:
    """Returns buffers: without a replica, without replica 0, without any samples."""
    replica = xla_replica.current()
    weights = (3.0, 0.0, 1.0)[rank], (0.0, 3.0, 1.0)[rank]
    models = [*(Buffers(rank, weight) for weight in weights), Buffers(rank + 7, 1.0)]
    for model, weight in zip(models, (*weights, 0)):
        vbs.average_buffers(model.to(replica.device), weight, replica)
    return [replica.fetch(list(model.buffers())) for model in models]


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_the_mean_is_weighted_and_ignores_replicas_without_samples(backend):
    """Without any samples replica 0 has the say."""
    for rank, outcomes in enumerate(backend.run(averaged)):
        for mean, buffers in zip((0.5, 1.25, 7.0), outcomes, strict=True):
            *means, table, count, empty = buffers
            for buffer, own in zip(means, Buffers(0, 1.0).buffers()):
                assert buffer.dtype == own.dtype
                assert torch.equal(buffer, torch.full_like(own, mean))
            assert torch.equal(table, Buffers(0, 1.0).table)  # equal: bit for bit
            assert count % 7 == rank
            assert empty.numel() == 0


# Replicas 1 and 2 are idle most of the time.
CASE = Case(
    (32, 32, 64, 32, 96, 32), 10, "sgd", "constant", 0.0, num_samples=512,
    minibatch_size=32,
)  # fmt: skip
INPUTS = 3 + 2 * torch.randn(512, 2, generator=torch.Generator().manual_seed(0))


def mean_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def statistics(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns BatchNorm's own after an epoch with idle replicas, and their means."""
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=0.05), nn.Linear(2, 1))
    training, found = Training(CASE, mean_of, made=(model, INPUTS, INPUTS)), []
    for epoch in range(CASE.epochs):
        training.epoch(epoch)
        found.append(torch.stack([model[0].running_mean, model[0].running_var]))
        training.optimizer.average_buffers(model)  # before its evaluation
    found.append(torch.stack([model[0].running_mean, model[0].running_var]))
    return tuple(training.replica.fetch(found[-2:]))


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_batchnorm_statistics_are_those_of_a_large_batch_run(backend):
    """They agree up to noise: its steps see whole batches, ours minibatches of 32."""
    drifted, averaged = zip(*backend.run(statistics))
    assert all(torch.equal(other, averaged[0]) for other in averaged)
    assert not torch.equal(drifted[0], drifted[2])  # else there was nothing to average
    oracle = nn.BatchNorm1d(2, momentum=0.05)
    for _, rows in batches(CASE):
        oracle(INPUTS[rows])
    expected = torch.stack([oracle.running_mean, oracle.running_var])
    torch.testing.assert_close(averaged[0], expected, rtol=0.08, atol=0.0)


class Counting(nn.Module):
    """Counts minibatches, samples and large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.register_buffer("samples", torch.tensor(5, dtype=torch.int32))
        self.register_buffer("large", torch.tensor([2**62, -(2**40)]))
        self.register_buffer("table", torch.tensor([2**62 + 1, -7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples += len(x)
        self.large += torch.tensor([2**33 + 1, -(2**33) - 1], device=x.device)
        return self.last(self.norm(x))


def counted(rank: int, folder: str | None, last: int, by_hand: bool = False):
    with (replica := xla_replica.current()).seeded(0):
        model = Counting()
    case = Case((8, 16, 4, 4, 12), last, "sgd", lr=0.0, num_samples=96, ref_batchsize=8)
    training = Training(case, mean_of, made=(model, INPUTS[:96], INPUTS[:96]))
    if by_hand:
        for epoch in range(last):
            training.epoch(epoch)
            training.optimizer.average_buffers(model)
    else:
        loader = DataLoader(training.inputs, batch_sampler=training.sampler)
        options = {"every_updates": 3, "progress": False, "checkpoint": folder}
        options |= {"model": model}
        for epoch in vbs.epochs(training.optimizer, loader, last, **options):
            for x in epoch:
                training.minibatch(x, x)
    found = zip(model.state_dict(), replica.fetch([*model.state_dict().values()]))
    return {name: each for name, each in found if not each.is_floating_point()}


@pytest.mark.parametrize("backend", [row("cpu", 3), row("xla", 3, slow=True)])
def test_counts_are_those_of_all_replicas_also_of_a_resumed_run(backend, tmp_path):
    alone = Backend(backend.device, 1)
    [expected] = alone.run(counted, None, 3, True)
    for first in (alone, backend):
        folder = str(tmp_path / str(first.num_replicas))
        first.run(counted, folder, 1)
        for state in (backend if first is alone else alone).run(counted, folder, 3):
            torch.testing.assert_close(state, expected)
    for state in backend.run(counted, None, 3, True):  # which is not told of the model
        name = "norm.num_batches_tracked"
        assert state[name] == expected[name]
