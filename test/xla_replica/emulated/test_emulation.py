"""Emulated replicas, which share a process: failures, and torch.compile."""

import multiprocessing
import os
import time

import pytest
import torch
from support.compiled import GraphCounter
from support.scripts import python
from support.xla_replica.replicas import MARKS, Backend, slow
from torch import nn

import xla_replica
from xla_replica import ReplicaError
from xla_replica.backends import counters

pytestmark = MARKS["xla"]
TWO, THREE, FOUR = (Backend("xla", n) for n in (2, 3, 4))


def misbehaves(rank: int, how: str) -> torch.Tensor | None:
    """Replica 2 deviates from its peers, which sum four numbers."""
    replica = xla_replica.current()
    how = how if rank == 2 else ""
    tensor = torch.ones(3 if how == "brings another shape" else 4).to(replica.device)
    # XLA itself would abort after 15 s.
    time.sleep({"hangs": 600, "is late": 17}.get(how, 0))
    if how == "leaves":
        return None
    if how in ("sums twice", "hangs at the end"):
        replica.all_reduce_([tensor])
    if how == "hangs at the end":
        replica.sync()
        time.sleep(600)
    tensor = tensor * 3.5 if how == "bakes its rank" else tensor
    pending = [tensor[:1] * 2] if how == "has other work pending" else []
    replica.all_reduce_([tensor])
    replica.sync()
    pending.clear()
    return replica.fetch([tensor])[0]


@pytest.mark.parametrize(("how", "error"), [
    ("hangs", r"replica 2 did not reach all_reduce\(sum, float32\[4\]\) within 3 s "
     r"(.|\n)*time.sleep\("),
    ("hangs at the end", r"replica 2 did not reach the end of its run within 3 s "
     r"of replicas 0, 1, 3(.|\n)*time.sleep\(600\)"),
    ("leaves", r"replica 2 returned while replicas? [013, ]+ wait in all_reduce"),
    ("brings another shape", r"disagree about collective 1 .* replica 2: all_reduce"
     r"\(sum, float32\[3\]\).* replicas 0, 1, 3: all_reduce\(sum, float32\[4\]\)"),
    ("sums twice", r"disagree about collective 2 .* replica 2: all_reduce.*"
     r"replicas 0, 1, 3: nothing"),
    ("bakes its rank", r"replica \d compiled another program than its peers"),
    ("has other work pending", r"replica \d compiled another program(.|\n)*"
     r"TPUs have run some of this kind"),
])  # fmt: skip
def test_a_replica_that_differs_ends_the_run(how, error):
    """Within the timeout and a child's start-up, not by XLA's silent abort."""
    start = time.monotonic()
    with pytest.raises(ReplicaError, match=error):
        FOUR.run(misbehaves, how, timeout=3)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("how", ["not at all", slow("is late")])
def test_well_behaved_replicas_give_results(how):
    """A run leaves no variable, no chosen device and no process."""
    before = dict(os.environ)
    results = FOUR.run(misbehaves, how)
    assert all(torch.equal(result, torch.full((4,), 4.0)) for result in results)
    assert dict(os.environ) == before
    assert multiprocessing.active_children() == []


ABORTS = """
import os, time, xla_replica

def waits():
    xla_replica.current().barrier()

def dies():
    time.sleep(1)
    os.abort()

def train(rank):
    waits()
    dies() if rank else waits()

if __name__ == "__main__":
    xla_replica.launch(train, num_replicas=2, device="xla")
"""


def test_where_replicas_were_is_told_if_their_process_aborts():
    done = python("-c", ABORTS, status=1)  # by which functions are sent, not imported
    assert "the process of the emulated replicas died (signal 6" in done.stderr
    assert "in dies" in done.stderr
    assert "in waits" in done.stderr


COUNT = counters.snapshot


def compiles_out_of_sight(rank: int) -> float:
    """Reads a number as C++ does, right after a sum, while a peer still counts."""
    replica = xla_replica.current()
    counters.snapshot = lambda: time.sleep(0.3) or COUNT()
    tensor = torch.ones(1).to(replica.device)
    replica.all_reduce_([tensor])
    replica.sync()
    with torch._C.DisableTorchFunction():
        return (tensor * (rank + 3)).item()


def test_a_compilation_of_a_peer_that_has_gone_on_is_not_this_replicas():
    assert TWO.run(compiles_out_of_sight) == [6.0, 8.0]


def fetches_before_the_sync(rank: int) -> dict[str, object]:
    """Reads a sum that has not run yet, in every way."""
    replica = xla_replica.current()

    def total() -> torch.Tensor:
        tensor = torch.tensor([1.0, 2.0]).to(replica.device)
        replica.all_reduce_([tensor])
        return tensor

    host, pending = torch.zeros(2), total()
    if rank == 0:  # reading the host needs no peer
        host[0] = torch.ones(1).item()
        host[:1].copy_(torch.ones(1))
    assert pending.tolist() == total().tolist() == [2.0, 4.0]
    assert (total()[0].item(), float(total()[1])) == (2.0, 4.0)
    for select, expected in (
        (lambda t: t[t > 2], [4.0]),
        (lambda t: torch.where(t > 2)[0], [1]),
        (lambda t: t.repeat_interleave(t.long()), [2.0, 2.0, 4.0, 4.0, 4.0, 4.0]),
    ):
        assert select(total()).tolist() == expected
    host[1] = total()[0]
    host[:1] = total()[1:]
    assert host.tolist() == [4.0, 2.0]
    assert torch.zeros(2).copy_(total()).tolist() == [2.0, 4.0]
    assert total().to(device="cpu", dtype=torch.float64).tolist() == [2.0, 4.0]
    assert (total() > 1).all()
    return {"model": torch.nn.Linear(2, 1).to(replica.device), "rank": rank}


def test_fetches_before_the_sync_are_safe():
    """And modules come back on the CPU."""
    for rank, result in enumerate(TWO.run(fetches_before_the_sync)):
        assert result["rank"] == rank
        assert result["model"].weight.device.type == "cpu"
        assert result["model"](torch.ones(1, 2)).shape == (1, 1)


def has_what_cannot_travel(rank: int, raises: bool) -> object:
    if raises:
        raise KeyError("lost contact", lambda: rank)
    return lambda: rank


def test_what_cannot_travel_still_tells():
    with pytest.raises(ReplicaError, match=r"raised KeyError: \('lost contact'"):
        TWO.run(has_what_cannot_travel, True)
    with pytest.raises(ReplicaError, match="result cannot be pickled"):
        TWO.run(has_what_cannot_travel, False)


# --- torch.compile ------------------------------------------------------------------


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


@pytest.mark.parametrize(("evaluates", "num_graphs"), [(False, 2), slow(True, 5)])
def test_replicas_compile_one_at_a_time(evaluates, num_graphs):
    """Forward and backward; in all, there are more variants than torch keeps."""
    with xla_replica.seeded(1):
        expected = num_graphs, torch.rand(1000).tolist()
    results = THREE.run(compiles_while_others_run, evaluates)
    assert results == 3 * [expected]


def sums_while_compiled(rank: int) -> list[int]:
    """Sums within a compiled function; returns how much each call compiles."""
    import torch_xla.core.xla_model as xm

    replica = xla_replica.current()

    @torch.compile(backend="openxla")
    def mean(x: torch.Tensor) -> torch.Tensor:
        return xm.all_reduce(xm.REDUCE_SUM, x * 2) / replica.num_replicas

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
    for first, _, *later in THREE.run(sums_while_compiled):
        assert first > 0
        assert later == [0, 0]
