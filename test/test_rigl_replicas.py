"""Replicas choose alike, and as one process does on all their data; XLA stays warm."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from support.replicas import FEW_BACKENDS, SEVERAL_REPLICAS, Backend, needs_xla
from support.sparse import batch, convnet, equal, pruned

import variable_batch_size as vbs
import xla_replica
from xla_replica import ReplicaError

STEPS = 13
SIZE = 120  # samples of a step, over all replicas: equal shares of 1, 2, 3, 5 and 8
OPTIONS = {
    "rigl": {},
    "window": {"delta": 4, "grad_accumulation_n": 3},
    "set": {"method": "set"},
    "snfs": {"method": "snfs"},
    "2:4": {"structure": "2:4", "dense_allocation": 1, "exclude": ["7"]},
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def run_of(rank: int, kind: str, ddp: bool = False) -> dict[str, torch.Tensor]:
    """Masks after a run in which each replica has its part of every batch.

    In float64: no rounding decides which connection is the larger.
    """
    replica = xla_replica.current()
    model = convnet().double().to(replica.device)
    called = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
    optimizer = sgd(model)
    pruner = pruned(called, optimizer, **OPTIONS[kind])
    for step in range(STEPS):
        images, labels = batch(step, SIZE)
        share = slice(replica.rank, None, replica.num_replicas)
        x, y = replica.send((images[share].double(), labels[share]))
        optimizer.zero_grad()
        F.cross_entropy(called(x), y).backward()
        if pruner():
            gradients = [parameter.grad for parameter in model.parameters()]
            if not ddp:
                replica.sync()
                replica.sum_(gradients)
                for gradient in gradients:
                    gradient /= replica.num_replicas
            optimizer.step()
        replica.sync()
    pruner.check_replicas()
    assert pruner.rigl_steps >= 3
    replica.barrier()  # nobody leaves the process group while others reduce
    masks = replica.fetch(list(pruner.masks.values()))
    return dict(zip(pruner.masks, masks))


@functools.cache
def run_of_one(kind: str) -> dict[str, torch.Tensor]:
    return run_of(0, kind)


def check_run(backend: Backend, kind: str, ddp: bool = False) -> None:
    for masks in backend.run(run_of, kind, ddp):
        assert equal(masks, run_of_one(kind))


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_replicas_choose_as_one_process_on_all_their_data(backend):
    check_run(backend, "rigl")


@pytest.mark.parametrize("backend", [FEW_BACKENDS[1], FEW_BACKENDS[4]])
@pytest.mark.parametrize("kind", sorted(set(OPTIONS) - {"rigl"}))
def test_so_do_the_other_methods(backend, kind):
    check_run(backend, kind)


def test_under_ddp():
    for kind in ("rigl", "window"):
        check_run(Backend("cpu", 2), kind, ddp=True)


def elastic_run(rank: int) -> dict[str, torch.Tensor]:
    """Batches of 4 to 24 samples: on 3 replicas, two of them idle now and then."""
    replica = xla_replica.current()
    model = convnet().double().to(replica.device)
    images, labels = batch(0, 256)
    dataset = torch.utils.data.TensorDataset(images.double(), labels)
    sampler = vbs.CustomSampler(
        dataset, [4, 24, 12, 8], minibatch_size=4, on_end="cycle"
    )
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=16)
    pruner = pruned(model, optimizer, skip_step=False, T_end=30, delta=2)
    sampler.set_epoch(0)
    optimizer.set_epoch(0)
    for minibatch in sampler:
        x, y = replica.send((images[minibatch].double(), labels[minibatch]))
        F.cross_entropy(model(x), y).backward()
        if pruner():
            optimizer.step()
    assert pruner.step == sampler.plan.num_steps
    assert pruner.rigl_steps == min(pruner.step, 29) // 2 > 5
    pruner.check_replicas()
    masks = replica.fetch(list(pruner.masks.values()))
    return dict(zip(pruner.masks, masks))


@functools.cache
def elastic_run_of_one() -> dict[str, torch.Tensor]:
    return elastic_run(0)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_inside_the_elastic_wrapper_with_idle_replicas(backend):
    for masks in backend.run(elastic_run):
        assert equal(masks, elastic_run_of_one())


def drift(rank: int) -> list[str]:
    """What is said of equal replicas, of other weights, and of other masks."""
    replica = xla_replica.current()
    messages = []
    for what in ("nothing", "weights", "masks"):
        model = convnet().to(replica.device)
        if what == "weights":
            with torch.no_grad():
                model[5].weight.mul_(replica.scalar(1 + rank))
        pruner = pruned(model, sgd(model), seed=rank if what == "masks" else 0)
        try:
            pruner.check_replicas()
            messages.append("")
        except ReplicaError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_drift_is_found(backend):
    for nothing, weights, masks in backend.run(drift):
        assert nothing == ""
        assert weights.startswith("weights differ between replicas in ['5.weight']")
        assert masks.startswith("masks differ between replicas in ['2.weight', '5")


def counted_run(rank: int, kind: str):
    """Compilations, transfers and fallbacks of 10 steps each, and the masks."""
    replica = xla_replica.current()
    model = convnet().double().to(replica.device)
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, **{**OPTIONS[kind], "delta": 10, "T_end": 102})
    counts, masks = [], []
    for first in range(0, 100, 10):
        with xla_replica.count(replica) as count:
            for step in range(first, first + 10):
                images, labels = batch(step)
                x, y = replica.send((images.double(), labels))
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if pruner():
                    optimizer.step()
                replica.sync()
        counts.append((count.compilations, count.transfers, count.fallbacks))
        masks.append(replica.fetch(list(pruner.masks.values())))
    assert pruner.rigl_steps == 10
    return counts, masks


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize(
    "kind",
    [
        "rigl",
        *(pytest.param(k, marks=pytest.mark.slow) for k in OPTIONS if k != "rigl"),
    ],
)
def test_after_the_first_update_nothing_compiles_and_nothing_is_read(kind):
    [(counts, masks)] = xla_replica.launch(counted_run, (kind,), 1, "xla")
    assert counts[0][0] <= (6 if kind in ("window", "snfs") else 4), counts
    assert [count[0] for count in counts[1:]] == [0] * 9
    assert all(count[1:] == (0, {}) for count in counts)
    _, on_cpu = counted_run(0, kind)
    for step, (found, expected) in enumerate(zip(masks, on_cpu)):
        for one, other in zip(found, expected):
            assert torch.equal(one, other), step


def moved_run(rank: int) -> str:
    replica = xla_replica.current()
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer)
    model.to(replica.device)
    try:
        pruner()
    except ValueError as error:
        return str(error)
    return ""


@needs_xla
@pytest.mark.xla
def test_moving_the_model_to_xla_later_is_an_error():
    [message] = xla_replica.launch(moved_run, (), 1, "xla")
    assert "build optimizer and pruner after the move" in message
