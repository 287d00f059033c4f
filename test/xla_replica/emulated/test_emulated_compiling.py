"""torch.compile on emulated replicas, which share a process."""

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


def compiles_while_others_run(rank: int, evaluates: bool) -> tuple[int, list[float]]:
    """Draws and compiles alone; returns the number of graphs and the numbers."""
    replica, counter = xla_replica.current(), GraphCounter("openxla")
    with replica.seeded(0):
        model, x = Model().to(replica.device), torch.randn(4, 6).to(replica.device)
    compiled = torch.compile(model, backend=counter)
    for _ in range(rank + 2):
        found, expected = (
            torch.autograd.grad(each(x).square().sum(), [*model.parameters()])
            for each in (compiled, model)
        )
        found, expected = replica.fetch(found), replica.fetch(expected)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    with replica.seeded(1):
        drawn = torch.rand(1000).tolist()
    if evaluates:
        model.eval()
        compiled(x)
        with torch.no_grad():
            compiled(x)
    return counter.num_graphs, drawn


@pytest.mark.parametrize(("evaluates", "num_graphs"), [
    (False, 2), pytest.param(True, 2 + 2 + 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_replicas_compile_one_at_a_time(evaluates, num_graphs):
    """Forward and backward; in all, there are more variants than torch keeps."""
    with xla_replica.seeded(1):
        expected = num_graphs, torch.rand(1000).tolist()
    results = Backend("xla", 3).run(compiles_while_others_run, evaluates)
    assert results == 3 * [expected]


def sums_while_compiled(rank: int) -> list[int]:
    """Sums within a compiled function; returns how much each call compiles."""
    import torch_xla.core.xla_model as xm

    replica = xla_replica.current()

    @torch.compile(backend="openxla")
    def mean(x: torch.Tensor) -> torch.Tensor:
        total = xm.all_reduce(xm.REDUCE_SUM, x * 2)
        return total / replica.num_replicas

    @torch.compile(backend="openxla")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compilations = []
    for n in range(4):
        with xla_replica.count(replica) as count:
            x = replica.scalar(rank + n)
            pending = xm.all_reduce(xm.REDUCE_SUM, x + 1)  # nothing below needs it
            other = doubled(x + 3)
            found = [float(v) for v in (mean(x), other, pending)]
        assert found == [2 * (n + 1), 2 * (rank + n + 3), 3 * (n + 1) + 3]
        compilations.append(count.compilations)
    return compilations


def test_a_collective_ends_the_graph():
    for first, _, *later in Backend("xla", 3).run(sums_while_compiled):
        assert first > 0
        assert later == [0, 0]
