"""Replicas that score one pool have one model."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from support.per_sample_grad.pool import BLOCK, Vectors, assert_same_bits, dense_model
from support.xla_replica.replicas import SEVERAL_REPLICAS, Backend, needs_xla
from torch import nn

import per_sample_grad as psg
import xla_replica
from xla_replica import ReplicaError

OPTIONS = {"block_size": BLOCK, "part_size": BLOCK, "progress": False}


def models_of(rank: int, kind: str) -> list[nn.Module]:
    """Returns two models, of which the second is another one on the last replica."""
    replica = xla_replica.current()
    last = rank == replica.num_replicas - 1
    with replica.seeded(0):
        models = [dense_model(), nn.Sequential(dense_model(), nn.BatchNorm1d(4))]
    if last and kind == "weight":
        models[1][0][3].bias.data[2] += 1e-7
    if last and kind == "buffer":
        models[1][1].running_mean += 1
    if last and kind == "name":
        models[1].append(nn.Linear(4, 4, bias=False))
    models[1].first = [models[1][0]]  # which a description has under this name
    return [model.to(replica.device) for model in models]


def told(models: object, folder: str | None) -> str:
    """Returns the error that scoring with these models is."""
    with pytest.raises(ReplicaError) as error:
        psg.score_pool(models, Vectors(41), folder=folder, **OPTIONS)
    return str(error.value)


DIFFERING = {"weight": "0.3.bias", "buffer": "1.running_mean", "name": "2.weight"}


def refused(rank: int, folder: str) -> list[str]:
    found = [told(models_of(rank, kind), None) for kind in DIFFERING]
    return [*found, told(models_of(rank, "weight"), folder)]


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_other_weights_are_an_error_on_every_replica(backend, tmp_path):
    for found in backend.run(refused, str(tmp_path)):
        for text, name in zip(found, [*DIFFERING.values(), DIFFERING["weight"]]):
            assert f"buffers differ): replica 0 has {{'model[1].{name}': " in text
            assert "1 of 3 differ from replica 0 (rank 2)" in text
            assert "Build the model once, before launch" in text
    assert not list(tmp_path.iterdir())


# Emulated replicas are threads.
together = threading.Barrier(3)


def seeded_alike(rank: int) -> np.ndarray:
    """Returns scores with a model that every replica has built after one seed."""
    torch.manual_seed(0)
    together.wait()  # so that none draws before all have seeded
    model = dense_model().to(xla_replica.current().device)
    return psg.score_pool(model, Vectors(41), **OPTIONS).scores


@needs_xla
@pytest.mark.xla
def test_replicas_that_seed_alike_build_one_model():
    first, *others = Backend("xla", 3).run(seeded_alike)
    for scores in others:
        assert_same_bits(scores, first)


def repaired(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores after the remedy, and those of replica 0's model by itself."""
    replica = xla_replica.current()
    with replica.seeded(0):  # one thread at a time
        model, truth = dense_model(rank), dense_model(0)
    model, truth = model.to(replica.device), truth.to(replica.device)
    replica.broadcast_([*model.parameters(), *model.buffers()])
    found = [psg.score_pool(m, Vectors(41), **OPTIONS).scores for m in (model, truth)]
    return found[0], found[1]


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_the_remedy_works(backend):
    for found, truth in backend.run(repaired):
        assert_same_bits(found, truth)
