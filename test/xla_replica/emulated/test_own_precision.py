"""Each emulated replica compiles with the precision that it has set itself."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from support.xla_replica.replicas import needs_xla

import xla_replica
from tools.tpu.cases import write_mark
from tools.tpu.program_checks import CASE_MARK, differences, programs_by_case

pytestmark = [needs_xla, pytest.mark.xla]
NUM_REPLICAS = 3
# The replicas are threads of one process.
_turns = threading.Barrier(NUM_REPLICAS)


def products(rank: int, fetches: bool) -> tuple[list[str], list[float]]:
    """Multiplies before and after full precision is asked for, while peers wait.

    Replicas come to their first use one after the other, in the reverse sequence.
    """
    import torch_xla.backends

    replica = xla_replica.current()
    sent = [replica.send(torch.ones(size, size)) for size in (2, 3)]
    replica.sync()
    write_mark(CASE_MARK + "products")
    found, values = [], []

    def multiply(matrix: torch.Tensor) -> None:
        product = (matrix @ matrix).sum()
        pending = matrix + 1  # which a fetch of the product leaves out
        if not fetches:
            replica.sync()
        values.append(product.item())
        found.append(torch_xla.backends.get_mat_mul_precision())
        del product
        replica.sync()
        del pending

    for turn in range(NUM_REPLICAS):
        if turn == NUM_REPLICAS - 1 - rank:
            multiply(sent[0])
            with xla_replica.full_matmul_precision(replica.device):
                multiply(sent[1])
        # Not the replicas' own, which compiles, with the precision before.
        _turns.wait()
    return found, values


@pytest.mark.parametrize("fetches", [False, True])
def test_programs_are_the_same_whoever_comes_first(monkeypatch, tmp_path, fetches):
    """Text is compared, since XLA:CPU computes the same with every precision."""
    log = tmp_path / "log"
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(log))
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "hlo")
    results = xla_replica.launch(products, (fetches,), NUM_REPLICAS, "xla")
    assert results == [(["default", "highest"], [8.0, 27.0])] * NUM_REPLICAS
    by_rank = [
        [
            program
            for program in programs_by_case(Path(f"{log}.{rank}").read_text())[
                "products"
            ]
            if " dot(" in program.text
        ]
        for rank in range(NUM_REPLICAS)
    ]
    assert differences(by_rank) == []
    precise = ["highest" in program.text for program in by_rank[0]]
    assert precise == [False, True]
