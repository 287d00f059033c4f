"""torch.compile on emulated replicas, which share a process."""

from __future__ import annotations

import pytest
import torch
from support.compiled import GraphCounter
from support.xla_replica.replicas import Backend, needs_xla
from torch import nn

import xla_replica

pytestmark = [needs_xla, pytest.mark.xla]


class Model(nn.Module):
    """What it computes depends on whether it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x).tanh() * (2 if self.training else 1)
        return x + self.second(x)[:, 1:].tanh().sum()


def compiles_while_others_run(
    rank: int, evaluates: bool
) -> tuple[int, list[float], list[float]]:
    """Each replica draws, runs and compiles for itself, without waiting for others.

    Returns the number of graphs, errors of gradients and numbers drawn.
    """
    replica = xla_replica.current()
    counter = GraphCounter("openxla")
    with replica.seeded(0):
        model = Model()
        x = torch.randn(4, 6)
    model, x = model.to(replica.device), x.to(replica.device)
    compiled = torch.compile(model, backend=counter)
    errors = []
    for _ in range(rank + 2):
        found, expected = (
            torch.autograd.grad(each(x).square().sum(), [*model.parameters()])
            for each in (compiled, model)
        )
        errors += [(f - e).abs().max() for f, e in zip(found, expected)]
    with replica.seeded(1):
        drawn = torch.rand(1000).tolist()
    if evaluates:
        model.eval()
        compiled(x)
        with torch.no_grad():
            compiled(x)
    return counter.num_graphs, [e.item() for e in replica.fetch(errors)], drawn


@pytest.mark.parametrize(
    "evaluates", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_replicas_compile_one_at_a_time(evaluates):
    # Forward and backward; in all, three replicas have more variants than torch keeps.
    expected_graphs = 2 + 2 + 1 if evaluates else 2
    with xla_replica.seeded(1):
        expected = torch.rand(1000).tolist()
    results = Backend("xla", 3).run(compiles_while_others_run, evaluates)
    for num_graphs, errors, drawn in results:
        assert num_graphs == expected_graphs
        assert max(errors) < 1e-4
        assert drawn == expected


def sums_while_compiled(rank: int) -> tuple[list[float], list[int]]:
    """Sums in the middle of a compiled function, whose other input is unrelated."""
    import torch_xla.core.xla_model as xm

    replica = xla_replica.current()

    @torch.compile(backend="openxla")
    def mean(x: torch.Tensor) -> torch.Tensor:
        total = xm.all_reduce(xm.REDUCE_SUM, x * 2)
        return total / replica.num_replicas

    @torch.compile(backend="openxla")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    values, compilations = [], []
    for number in range(4):
        with xla_replica.count(replica) as count:
            x = replica.scalar(rank + number)
            pending = xm.all_reduce(xm.REDUCE_SUM, x + 1)  # nothing below needs it
            other = doubled(x + 3)
            values.append([float(v) for v in (mean(x), other, pending)])
        compilations.append(count.compilations)
    return values, compilations


def test_a_collective_ends_the_graph():
    for rank, (values, compilations) in enumerate(
        Backend("xla", 3).run(sums_while_compiled)
    ):
        assert values == [
            [2 * (n + 1), 2 * (rank + n + 3), 3 * (n + 1) + 3] for n in range(4)
        ]
        assert compilations[0] > 0
        assert compilations[2:] == [0, 0]
