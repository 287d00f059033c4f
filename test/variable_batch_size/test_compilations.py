"""After warm-up no change compiles a graph or reads the device back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.variable_batch_size.elastic import Case, Training
from support.xla_replica.replicas import (
    HAS_XLA,
    TORCHTPU,
    XLA_BACKENDS,
    Backend,
    on_xla,
)
from torch import nn

import xla_replica

# The learning rates that this makes, lr = 1/4 at ref 16: among them exactly 1.0, which
# a compiled program would hold as a constant, and 0.5, the momentum. Three replicas of
# 4 samples idle below 12.
BATCH_SIZES = [4 * n for n in (1, 2, 3, 4, 5, 7, 8, 11, 16)]
SAMPLES = sum(BATCH_SIZES)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def counted_epochs(
    rank: int, optimizer: str, rule: str, backend: str = ""
) -> list[tuple[int, int, int]]:
    """Returns the compilations, transfers and fallbacks of each epoch."""
    with xla_replica.current().seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        inputs, targets = torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,))
    case = Case(BATCH_SIZES, 3, optimizer, rule, 0.25, max_grad_norm=1.0)
    training = Training(case, loss_of, made=(model, inputs, targets))
    if backend:
        called = torch.compile(model, backend=backend)
        training.loss = lambda _, x, y: loss_of(called, x, y)
    counts = [training.counted_epoch(epoch) for epoch in range(2)]
    training.optimizer.set_lr((0.0,))  # what a warm-up begins with
    return [*counts, training.counted_epoch(2)]


RUNS = [
    ("sgd-momentum", "linear"),
    ("sgd-momentum", "linear-momentum"),
    ("adamw", "root"),
    ("adagrad", "root"),
    ("rmsprop", "root"),
    ("sgd-momentum", "adascale"),
    ("adamw", "adam-half-life"),
    ("sgd-momentum", "linear", "openxla"),
]


def all_counted_epochs(
    rank: int,
) -> dict[tuple[str, ...], list[tuple[int, int, int]]]:
    runs = [run for run in RUNS if HAS_XLA or "openxla" not in run]
    return {run: counted_epochs(rank, *run) for run in runs}


@pytest.fixture(scope="module", params=[*XLA_BACKENDS, *TORCHTPU])
def counts(request):
    return request.param.run(all_counted_epochs)


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_steady_state_compiles_and_transfers_nothing(counts, run):
    assert counts[0][RUNS[0]][0][0] > 0
    for replica in counts:
        if run not in replica:
            pytest.skip("its compiler is torch_xla's")
        first, second, third = replica[run]
        assert second == (0, 0, 0)
        assert third == (0, 0, 0)
        assert first[1:] == (0, 0)


def deferred(rank: int) -> dict[tuple[str, ...], list[tuple[int, int, int]]]:
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        return all_counted_epochs(rank)


@pytest.mark.parametrize("backend", TORCHTPU)
def test_deferred_operations_compile_as_little(backend):
    for counted in backend.run(deferred):
        for run, (_, second, third) in counted.items():
            assert (second, third) == ((0, 0, 0), (0, 0, 0)), run


def graphs_of_first_epoch(rank: int, num_batch_sizes: int) -> int:
    trace = [4 * (1 + n % num_batch_sizes) for n in range(32)]
    made = nn.Linear(6, 3), torch.ones(2048, 6), torch.zeros(2048, dtype=torch.int64)
    training = Training(Case(trace), loss_of, {"on_end": "stop"}, made)
    return training.counted_epoch(0)[0]


@pytest.mark.parametrize("backend", XLA_BACKENDS)
@pytest.mark.parametrize("num_batch_sizes", [1, 16])
def test_three_graphs_for_any_number_of_batch_sizes(backend, num_batch_sizes):
    """They are the minibatch, the update, and the update that creates momentum."""
    assert set(backend.run(graphs_of_first_epoch, num_batch_sizes)) == {3}


def test_the_first_epoch_is_worth_counting():
    """Its batch sizes make replicas idle, and one learning rate exactly one."""
    assert min(BATCH_SIZES) < 4 * 3
    assert {0.5, 1.0} <= {0.25 * size / 16 for size in BATCH_SIZES}


def a_fetch_and_numbers_in_a_graph(rank: int) -> tuple[int, int, int]:
    replica = xla_replica.current()
    tensors = [torch.ones(3, device=replica.device) * replica.scalar(k) for k in (2, 3)]
    replica.wait()
    with xla_replica.count() as count:
        values = replica.fetch(tensors)
    assert [v.tolist() for v in values] == [[2.0] * 3, [3.0] * 3]
    with xla_replica.count() as items:
        assert tensors[0][0].item() == 2.0
    with xla_replica.count() as programs:
        for shape in (2, 3, 4):
            tensors[0].expand(shape, 3).sum().item()
    return count.transfers, items.transfers, programs.compilations


@on_xla
def test_the_counter_sees_transfers_and_compilations():
    assert Backend("xla", 1).run(a_fetch_and_numbers_in_a_graph) == [(1, 1, 3)]
