"""AdaScale and the closed loop by the noise of normalisation layers, resumed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.variable_batch_size import elastic
from support.variable_batch_size.elastic import Case
from support.xla_replica.replicas import Backend, needs_xla
from torch import nn

import variable_batch_size as vbs
import xla_replica

COUNT, MINIBATCH, EPOCHS = 96, 4, 2


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x).squeeze(1) - y) ** 2).mean()


class Run(elastic.Training):
    """A regression with a LayerNorm, in float64; ``most`` is for a controller."""

    def __init__(self, folder: Path, trace, rule: str, use: bool, most: int = 0):
        with xla_replica.current().seeded(1):
            model = nn.Sequential(
                nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)
            ).double()
        draws = torch.Generator().manual_seed(0)
        x = torch.randn(COUNT, 6, generator=draws, dtype=torch.float64)
        noise = torch.randn(COUNT, generator=draws, dtype=torch.float64)
        case = Case(trace, EPOCHS, "sgd", rule, 0.05, ref_batchsize=MINIBATCH)
        made = model, x, x.sum(1) + noise
        super().__init__(case, loss_of, {"on_end": "hold"}, made, noise=True)
        if use:
            self.optimizer.noise.use_norm_layers(self.model)
        self.told: list[tuple[int, int, float]] = []
        self.optimizer.attach(self._tell)
        self.log = vbs.RunLog(folder / "run.jsonl", self.optimizer, log_steps=1)
        if most:
            controller = vbs.BatchSizeController(
                self.optimizer, least=MINIBATCH, most=most, every=4, log=self.log
            )
            self.optimizer.attach(controller)
        self.checkpointer = vbs.Checkpointer(
            folder, self.optimizer, every_updates=5, model=self.model, stop_on=()
        )
        self.checkpointer.load()
        self.optimizer.attach(self.checkpointer)

    def _tell(self, update: vbs.Update) -> None:
        [lr] = self.replica.fetch([torch.as_tensor(update.lr[0])])
        self.told.append((update.step, update.batch_size, lr.item()))


def adascale(rank: int, folder: Path, use: bool = True, kill_at: float = math.inf):
    """Returns what the updates were, what is measured in the end, and by whom."""
    run = Run(folder, [4, 8, 12, *[4] * 100], "adascale", use)
    run.train_until(kill_at)
    found = run.optimizer.noise.measure()
    return run.told, found, run.optimizer.noise.estimator, run.weights()


JOBS = [
    pytest.param(("cpu", 1), ("cpu", 3), id="1-3"),
    pytest.param(("cpu", 3), ("cpu", 1), id="3-1", marks=pytest.mark.slow),
    pytest.param(
        ("xla", 2), ("xla", 1), id="xla-2-1",
        marks=[pytest.mark.slow, pytest.mark.xla, needs_xla],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), JOBS)
def test_adascale_with_one_minibatch_a_step_resumes_on_other_replicas(
    tmp_path, first, second
):
    whole, truth, estimator, weights = adascale(0, tmp_path / "a")
    assert estimator == "norm layers"
    assert truth.norm_factor != 1
    Backend(*first).run(adascale, tmp_path / "b", True, 22)
    outcomes = Backend(*second).run(adascale, tmp_path / "b")
    for told, found, estimator, resumed in outcomes:
        assert estimator == "norm layers"
        assert told[0][0] == 20
        assert [step[:2] for step in told] == [step[:2] for step in whole[20:]]
        rates = [step[2] for step in told], [step[2] for step in whole[20:]]
        assert rates[0] == pytest.approx(rates[1], rel=1e-5)
        assert found == pytest.approx(truth, rel=1e-5)
        torch.testing.assert_close(resumed, weights, rtol=1e-5, atol=1e-8)


def controlled(rank: int, folder: Path, use: bool = True, kill_at: float = math.inf):
    """Returns the steps' batch sizes; they begin with one minibatch."""
    run = Run(folder, MINIBATCH, "linear", use, most=24)
    run.train_until(kill_at)
    return [step[:2] for step in run.told]


@pytest.mark.parametrize(("first", "second"), JOBS)
def test_the_closed_loop_leaves_one_minibatch_a_step_and_resumes(
    tmp_path, first, second
):
    """Without normalisation layers nothing is known, and nothing is changed."""
    assert {size for _, size in controlled(0, tmp_path / "none", False)} == {MINIBATCH}
    whole = controlled(0, tmp_path / "whole")
    assert max(size for _, size in whole) > 2 * MINIBATCH
    Backend(*first).run(controlled, tmp_path / "run", True, 12)
    for told in Backend(*second).run(controlled, tmp_path / "run"):
        assert told == whole[10:]
    log = vbs.read_run(tmp_path / "run" / "run.jsonl")
    decisions = [event for event in log.events if event["event"] == "decision"]
    # The factor is not known before a step has several minibatches.
    assert decisions[0]["noise_estimator"] == "norm layers, factor unknown"
