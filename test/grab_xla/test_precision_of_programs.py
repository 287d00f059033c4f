"""A balance computes in full precision, and the training beside it as the user asked.

The programs are read, since XLA:CPU computes the same with every precision.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.xla_replica.replicas import needs_xla
from torch import nn

import xla_replica
from tools.tpu import cases
from tools.tpu.program_checks import CASE_MARK, products, programs_by_case

pytestmark = [needs_xla, pytest.mark.xla]


def of_tokens() -> nn.Module:
    """Returns a model whose weights are applied to several positions of a sample."""
    last = nn.Linear(5 * 9, cases.CLASSES)
    return nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Flatten(), last)


WORK = cases.Work(of_tokens, (5, 8), 6)
FORWARD_AND_BACK = ("30,9 = 30,8 x 8,9", "6,10 = 6,45 x 45,10", "6,45 = 6,10 x 10,45")
OF_WEIGHTS = ("8,9 = 8,30 x 30,9", "45,10 = 45,6 x 6,10")
RUNS = {
    "plain": lambda: cases.plain(WORK),
    **{
        fidelity: lambda fidelity=fidelity: cases.ordered("mean", fidelity, WORK)
        for fidelity in ("exact", "projected", "group")
    },
    "norms": lambda: cases.per_sample("norms", WORK),
}


def run_all(rank: int) -> None:
    for name in RUNS:
        xla_replica.current().sync()
        cases.write_mark(CASE_MARK + name)
        RUNS[name]()
        xla_replica.current().barrier()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_only_the_balance_is_above_the_precision_of_training(
    monkeypatch, tmp_path, num_replicas
):
    log = tmp_path / "log"
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(log))
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "hlo")
    xla_replica.launch(run_all, (), num_replicas, "xla")
    last_steps = programs_by_case(Path(f"{log}.0").read_text(), last_step=True)
    for name, programs in last_steps.items():
        counts = Counter(each for program in programs for each in products(program))
        expected = FORWARD_AND_BACK + OF_WEIGHTS * (name != "norms")
        by_training = Counter((shapes, "default") for shapes in expected)
        assert counts & by_training == by_training, name
        above = {precision for _, precision in counts - by_training}
        assert above == (set() if name == "plain" else {"highest"}), name
