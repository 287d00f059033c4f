"""Averaged buffers: equal on all replicas, as good as a large-batch run's."""

from __future__ import annotations

import pytest
import torch
from support.variable_batch_size.elastic import Case, Training, batches
from support.xla_replica.replicas import SEVERAL_REPLICAS
from torch import nn

import variable_batch_size as vbs
import xla_replica


class Buffers(nn.Module):
    def __init__(self, rank: int, weight: float) -> None:
        super().__init__()
        value = float("nan") if weight == 0 else float(rank)
        self.register_buffer("vector", torch.full((3,), value))
        self.register_buffer("scalar", torch.tensor(value))
        self.register_buffer("wide", torch.full((2,), value, dtype=torch.float64))
        self.register_buffer("narrow", torch.full((2,), value, dtype=torch.bfloat16))
        self.register_buffer("table", torch.tensor([0.1, 1 / 3, -3e38, -torch.inf]))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("empty", torch.zeros(0))


WEIGHTS = ((3.0, 0.0, 1.0), (0.0, 3.0, 1.0))  # also without replica 0
MEANS = (0.5, 1.25)


def averaged(rank: int) -> list[list[torch.Tensor]]:
    """Returns the buffers for each of `WEIGHTS`, and last without any samples."""
    replica = xla_replica.current()
    models = [(Buffers(rank, weights[rank]), weights[rank]) for weights in WEIGHTS]
    models.append((Buffers(rank + 7, 1.0), 0))
    for model, weight in models:
        vbs.average_buffers(model.to(replica.device), weight, replica)
    return [replica.fetch(list(model.buffers())) for model, _ in models]


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_the_mean_is_weighted_and_ignores_replicas_without_samples(backend):
    """Without any samples replica 0 has the say."""
    for rank, outcomes in enumerate(backend.run(averaged)):
        for mean, buffers in zip((*MEANS, 7.0), outcomes, strict=True):
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


def inputs_of_norm() -> torch.Tensor:
    return 3 + 2 * torch.randn(512, 2, generator=torch.Generator().manual_seed(0))


def statistics(rank: int) -> dict[str, torch.Tensor]:
    """Returns BatchNorm's statistics after epochs in which replicas were idle."""
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=0.05), nn.Linear(2, 1))
    made = model, inputs_of_norm(), inputs_of_norm()
    training = Training(CASE, lambda m, x, y: m(x).mean(), made=made)
    found = [model[0].running_mean, model[0].running_var]
    for epoch in range(10):
        training.epoch(epoch)
        drifted = training.replica.fetch(found)
        training.optimizer.average_buffers(model)  # before its evaluation
    averaged = training.replica.fetch(found)
    return {"drifted": torch.stack(drifted), "averaged": torch.stack(averaged)}


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_batchnorm_statistics_are_those_of_a_large_batch_run(backend):
    """They agree up to noise: its steps see whole batches, ours minibatches of 32."""
    outcomes = backend.run(statistics)
    averaged = [outcome["averaged"] for outcome in outcomes]
    assert all(torch.equal(other, averaged[0]) for other in averaged)
    drifted = [outcome["drifted"] for outcome in outcomes]
    assert not torch.equal(drifted[0], drifted[2])  # else there was nothing to average

    oracle, inputs = nn.BatchNorm1d(2, momentum=0.05), inputs_of_norm()
    for _, rows in batches(CASE):
        oracle(inputs[rows])
    reference = torch.stack([oracle.running_mean, oracle.running_var])
    torch.testing.assert_close(averaged[0], reference, rtol=0.08, atol=0.0)
