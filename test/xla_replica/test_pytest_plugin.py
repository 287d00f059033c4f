"""The fixture that runs a test's function on N replicas."""

from __future__ import annotations

import pytest
from support.documents import block
from support.scripts import python
from support.xla_replica.replicas import on_xla

import xla_replica
from xla_replica import ReplicaError

pytest_plugins = ["xla_replica.pytest_plugin"]


def sums(rank: int, scale: float) -> float:
    replica = xla_replica.current()
    tensor = replica.scalar(scale * rank)
    replica.all_reduce_([tensor])
    return replica.fetch([tensor])[0].item()


@on_xla
def test_a_function_runs_on_every_replica(xla_replicas):
    assert xla_replicas(4, sums, 2.0) == [12.0] * 4


def divides(rank: int) -> float:
    return 1 / (rank - 1)


def test_a_failure_shows_the_replicas_traceback(xla_replicas):
    with pytest.raises(ReplicaError) as failed:
        xla_replicas(2, divides, device="cpu")
    assert failed.value.rank == 1
    assert "return 1 / (rank - 1)" in str(failed.value)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


PAGE = """
import xla_replica

{example}
def fails(rank):
    raise KeyError(f"on replica {{rank}}")

def test_fails(xla_replicas):
    xla_replicas(2, fails)
"""


@on_xla
@pytest.mark.slow
def test_the_page_shows_how(tmp_path):
    conftest = block("docs/xla_replica.md", "python", "# conftest.py")
    example = block("docs/xla_replica.md", "python", "# test_sums.py")
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_sums.py").write_text(PAGE.format(example=example))
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path, timeout=200)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert 'raise KeyError(f"on replica {rank}")' in done.stdout
