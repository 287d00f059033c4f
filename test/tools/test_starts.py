"""How many programs the start of a training compiles on torch_xla.

Its cache on disk cannot be loaded, so every start compiles all of them.
"""

from __future__ import annotations

import json

import pytest
from support.documents import ROOT, read
from support.xla_replica.replicas import needs_xla

import xla_replica
from tools.benchmarks import bench_start

RECORD = ROOT / "docs/benchmarks/report/bench_start.json"
# Three are a minibatch, an update, and the update that makes the momentum.
LIMITS = {"linear": 3, "adascale": 3, "GraB": 7, "RigL": 7}


def all_starts(rank: int) -> dict[str, int]:
    return {kind: bench_start.start(rank, kind, 0.0)[1] for kind in bench_start.KINDS}


@needs_xla
@pytest.mark.xla
def test_a_start_compiles_few_programs():
    [programs, _] = xla_replica.launch(all_starts, (), 2, "xla")
    assert programs == LIMITS


def test_the_page_says_how_many():
    record, page = json.loads(RECORD.read_text()), read("docs/tpu.md")
    for kind, limit in LIMITS.items():
        assert record[kind]["programs"] == [limit, limit]
        assert f"| {kind} | {limit} |" in page
