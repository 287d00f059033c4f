"""Each emulated replica compiles with the precision that it has set itself."""

import threading
from pathlib import Path

import pytest
import torch
from support.xla_replica.replicas import needs_xla

import xla_replica
from tools.tpu.cases import write_mark
from tools.tpu.program_checks import CASE_MARK, Program, differences, programs_by_case

pytestmark = [needs_xla, pytest.mark.xla]
NUM_REPLICAS = 3
# The replicas are threads of one process.
_turns = threading.Barrier(NUM_REPLICAS)
_fetching, _switched = threading.Event(), threading.Event()


def products(rank: int, fetches: bool) -> list[tuple[str, float]]:
    """Multiplies before and after another precision is set, while peers wait."""
    import torch_xla.backends

    replica = xla_replica.current()
    sent = [replica.send(torch.ones(size, size)) for size in (2, 3)]
    replica.sync()
    write_mark(CASE_MARK + "products")
    found = []
    for turn in range(NUM_REPLICAS):
        for matrix in sent if turn == NUM_REPLICAS - 1 - rank else []:
            product = (matrix @ matrix).sum()
            pending = matrix + 1  # which a fetch of the product leaves out
            if not fetches:
                replica.sync()
            found.append((torch_xla.backends.get_mat_mul_precision(), product.item()))
            del product
            replica.sync()
            del pending
            torch_xla.backends.set_mat_mul_precision("highest")
        # Not the replicas' own, which compiles, with the precision before.
        _turns.wait()
    return found


class Awaited(float):
    """A number with which a fetch begins, and goes on after a peer's switch."""

    def __eq__(self, matrix: torch.Tensor) -> torch.Tensor:
        _fetching.set()
        _switched.wait(2)  # the peer waits until the fetch has ended
        return matrix @ matrix == float(self)


def fetch_beside_a_switch(rank: int) -> bool:
    """Fetches a product on one replica, while its peer sets another precision."""
    import torch_xla.backends

    replica = xla_replica.current()
    matrix = replica.send(torch.eye(2))
    replica.sync()
    write_mark(CASE_MARK + "products")
    if rank == 0:
        return Awaited(1) in matrix
    _fetching.wait()
    product = matrix @ matrix
    torch_xla.backends.set_mat_mul_precision("highest")
    replica.sync()
    _switched.set()
    return bool(product.any())


def products_by_rank(log: Path, num_replicas: int) -> list[list[Program]]:
    logs = [Path(f"{log}.{rank}").read_text() for rank in range(num_replicas)]
    programs = [programs_by_case(text)["products"] for text in logs]
    return [[each for each in some if " dot(" in each.text] for some in programs]


@pytest.fixture
def log(monkeypatch, tmp_path) -> Path:
    """The file, without a replica's rank, to which programs are written."""
    path = tmp_path / "log"
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(path))
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "hlo")
    return path


@pytest.mark.parametrize("fetches", [False, True])
def test_programs_are_the_same_whoever_comes_first(log, fetches):
    """Text is compared, since XLA:CPU computes the same with every precision."""
    results = xla_replica.launch(products, (fetches,), NUM_REPLICAS, "xla")
    assert results == [[("default", 8.0), ("highest", 27.0)]] * NUM_REPLICAS
    by_rank = products_by_rank(log, NUM_REPLICAS)
    assert differences(by_rank) == []
    assert ["highest" in program.text for program in by_rank[0]] == [False, True]


def test_a_switch_leaves_a_fetch_that_has_begun_as_it_is(log):
    """A fetch took no lock as long as nobody had asked for another precision."""
    assert xla_replica.launch(fetch_beside_a_switch, (), 2, "xla") == [True, True]
    (fetched,), (switched,) = products_by_rank(log, 2)
    assert "highest" not in fetched.text
    assert "highest" in switched.text
