"""Programs that are written without being run are those that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.xla_replica.replicas import needs_xla
from torch import nn

import xla_replica
from tools.tpu import cases
from tools.tpu.program_checks import CASE_MARK, programs_by_case
from tools.tpu.tracing import scatter_add, tracing

WORK = cases.Work(lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 10)), (1, 5), 3)


def run_elastic(rank: int) -> None:
    xla_replica.current().sync()
    cases.write_mark(CASE_MARK + "adascale")
    cases.elastic("adascale", "sgd", WORK)


def narrow(rank: int) -> torch.Tensor:
    """Sums bfloat16, and returns what a replica reads of it."""
    replica = xla_replica.current()
    values = torch.full((4,), float(rank), dtype=torch.bfloat16, device=replica.device)
    cases.write_mark(CASE_MARK + "narrow")
    replica.all_reduce_([values])
    assert not values.float().cpu().any()
    return replica.fetch([values])[0]


def run_traced(rank: int) -> Any:
    with tracing(cases.write_mark):
        run_elastic(rank)
        return narrow(rank)


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Returns the log of one of a function's replicas, and their results."""

    def write(function: Any) -> tuple[str, list[Any]]:
        path = tmp_path / function.__name__
        monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(path))
        monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "hlo")
        results = xla_replica.launch(function, (), 2, "xla")
        return Path(f"{path}.1").read_text(), results

    return write


@needs_xla
@pytest.mark.xla
def test_traced_programs_are_those_that_run(written):
    run, _ = written(run_elastic)
    traced, fetched = written(run_traced)
    expected, found = (
        [one.text.strip() for one in programs_by_case(log, last_step=True)["adascale"]]
        for log in (run, traced)
    )
    assert len(expected) == 2
    assert expected == found
    [program] = programs_by_case(traced)["narrow"]
    assert [each.split("{")[0] for each in program.collectives] == [
        "all-reduce (bf16[4]"
    ]
    assert [each.tolist() for each in fetched] == [[0.0] * 4] * 2


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_dense_scatter_is_torchs(dim):
    size = [3, 4, 2]
    index, values = torch.randint(0, 7, size), torch.randn(size)
    size[dim] = 7
    tensor = torch.randn(size)
    torch.testing.assert_close(
        scatter_add(tensor, dim, index, values), tensor.scatter_add(dim, index, values)
    )
