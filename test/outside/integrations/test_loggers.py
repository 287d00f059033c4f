"""The numbers of a run arrive in other people's loggers, as a user hands them over."""

from __future__ import annotations

import pytest
import torch
from support.outside import package

import variable_batch_size as vbs

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]

TRACE = (4, 8, 16, 4, 8, 8, 12, 4)
LOG_STEPS = 3


def train(*sinks: vbs.Sink) -> None:
    """Trains one epoch of eight updates, and tells of an evaluation."""
    parameter = torch.nn.Parameter(torch.ones(1))
    sampler = vbs.CustomSampler(range(64), TRACE, minibatch_size=4, verbose=False)
    optimizer = vbs.LinearRuleOptimizer(
        torch.optim.SGD([parameter], 0.125), sampler, 4, noise=True
    )
    log = vbs.RunLog(None, optimizer, log_steps=LOG_STEPS, sinks=sinks)
    optimizer.attach(log)
    for rows in sampler:
        loss = (parameter * len(rows)).sum()
        loss.backward()
        log.add(loss)
        optimizer.step()
    log.write(accuracy=70.5)
    log.close()


def check(found: dict[str, list[tuple[int, float]]]) -> None:
    """Fails unless (step, value) by name are those of the run."""
    steps = range(0, len(TRACE), LOG_STEPS)
    assert found["batch_size"] == [(step, TRACE[step]) for step in steps]
    assert found["lr"] == [(step, TRACE[step] / 32) for step in steps]
    assert [step for step, _ in found["loss"]] == [*steps]
    assert [step for step, _ in found["noise_scale"]] == [*steps][1:]
    assert all(value > 0 for _, value in found["samples_per_second"])
    assert found["accuracy"] == [(len(TRACE) - 1, 70.5)]


def test_mlflow_takes_them_by_log_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which MLflow 3 asks for
    mlflow = package("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        train(mlflow.log_metrics)
    client, run_id = mlflow.MlflowClient(), run.info.run_id
    names = client.get_run(run_id).data.metrics
    histories = {name: client.get_metric_history(run_id, name) for name in names}
    check({name: [(m.step, m.value) for m in each] for name, each in histories.items()})
