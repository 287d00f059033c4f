"""A simulated run has the steps, samples and learning rates of the real one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.variable_batch_size.elastic import Case, Training
from support.xla_replica.replicas import row

from variable_batch_size import trace_tools as tools
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.trace_tools import StepTime, check, simulate, stats, totals
from variable_batch_size.trace_tools.step_time import fit_step_time
from variable_batch_size.traces.batch_trace import Trace

TRACE = (4, 8, 12, 32, 64, 40, 20, 4)
RULES = {
    "constant": "sgd", "linear": "sgd", "linear-momentum": "sgd", "root": "adamw",
    "power:0.75": "sgd", "adam-root": "adamw", "adam-half-life": "adamw",
}  # fmt: skip


def schedule_of(case: Case) -> Schedule:
    return Schedule(Trace(case.trace), case.num_samples, case.minibatch_size, "cycle")


def real_runs(rank: int, case: Case) -> dict[str, Any]:
    runs = {}
    for rule, optimizer in RULES.items():
        training = Training(dataclasses.replace(case, rule=rule, optimizer=optimizer))
        training.train()
        told = [(u.epoch, u.step, u.batch_size, u.lr[0]) for u in training.updates]
        runs[rule] = (told, len(training.samples))
    return runs


@pytest.mark.parametrize("backend", [row("cpu", 3), row("xla", 2)])
def test_it_is_the_run_that_replicas_make(backend):
    case = Case(TRACE, epochs=4, lr=0.125)
    runs = backend.run(real_runs, case)
    devices = backend.num_replicas
    for rule in RULES:
        options = {"rule": rule, "ref_batchsize": case.ref_batchsize, "lr": case.lr}
        steps = simulate(schedule_of(case), case.epochs, devices=devices, **options)
        columns = ["epoch", "step", "batch_size", "lr"]
        found = [*steps[columns].itertuples(index=False, name=None)]
        assert found == runs[0][rule][0] == runs[-1][rule][0]
        substeps = [run[rule][1] for run in runs]
        assert substeps[0] == steps["num_substeps"].sum()
        idle = sum(substeps[0] - others for others in substeps)
        assert idle == steps["idle_substeps"].sum()
    expected = {"idle replica-substeps": idle, "steps": len(found)}
    expected["samples"] = sum(size for _, _, size, _ in found)
    assert check(schedule_of(case), devices, case.epochs).items() >= expected.items()
    assert steps["samples"].iloc[-1] == expected["samples"]


def test_a_table_tells_what_epochs_use_and_drop():
    schedule = schedule_of(Case(TRACE, epochs=5))
    table = tools.epoch_table(schedule, 5)
    used = simulate(schedule, 5).groupby("epoch")["batch_size"].sum().tolist()
    assert table["samples"].tolist() == used
    assert table["dropped_samples"].tolist() == [128 - samples for samples in used]
    assert len(simulate(Schedule(Trace(16), 48, 8), 2)) == 6  # a trace without end


def test_padded_steps_have_the_samples_of_the_trace():
    schedule = Schedule(Trace([10, 25, 13]), 60, 10, pad_minibatches=True)
    steps = simulate(schedule, rule="linear", ref_batchsize=10, devices=2)
    found = steps[["batch_size", "samples", "lr", "num_substeps"]]
    assert found.values.tolist() == [
        [10, 10, 1.0, 1],
        [25, 35, 2.5, 2],
        [13, 48, 1.3, 1],
    ]
    assert tools.epoch_table(schedule)["samples"].tolist() == [48]
    assert check(schedule, 2)["samples of padding"] == 5 + 7


def test_the_end_of_the_trace_is_not_a_dropped_sample():
    """40 + 40 of 100 samples, 40 + 60, and then the trace ends after 20."""
    schedule = Schedule(Trace([40, 40, 40, 60, 20]), 100, 20)
    counted = check(schedule, 4, seconds_per_substep=0.5)
    assert counted.items() >= {
        "epochs": 3, "dropped samples": 20, "dropped samples in per cent": 10,
        "samples of the last epoch after the trace's end": 80,
        "idle replica-substeps": 2 + 2 + 2 + 1 + 3, "idle replica-seconds": 5,
        "steps with a replica that is idle throughout": 5,
    }.items()  # fmt: skip
    expected = {"steps of the trace that are not used": 3, "dropped samples": 20}
    expected["idle replica-substeps"] = 0
    assert check(schedule, 1, num_epochs=1).items() >= expected.items()


def test_stats_are_those_of_the_numbers():
    told = stats(Trace([64, 96, 96, 32]))
    assert told["largest minibatch size"] == 32
    assert told["changes"] == 2
    assert (told["mean batch size"], told["median batch size"]) == (72, 80)
    names = ("steps", "samples", "mean batch size", "without end, after these steps")
    endless = pd.DataFrame({"samples": [0, 128], "batchsize": [64, 96]})
    told = [[stats(Trace(source))[name] for name in names] for source in (endless, 64)]
    assert told == [[2, 128, 64, 96], [0, 0, 64, 64]]


def test_progress_follows_the_noise_scale():
    """AdaScale's learning rate is the reference's times the gain."""
    schedule = Schedule(Trace([8, 16, 32]), 56, 8)
    options = {"rule": "adascale", "ref_batchsize": 8, "noise_scale": 24.0}
    steps = simulate(schedule, lr=0.5, **options)
    gains = np.array([1, 2 * 32 / 40, 4 * 32 / 56])
    expected = {"gain": gains, "progress": gains.cumsum(), "lr": 0.5 * gains}
    for name, values in expected.items():
        assert steps[name].tolist() == pytest.approx(values)
    told = totals(steps)["progress in steps at the reference"]
    assert told == pytest.approx(sum(gains))


def test_time_and_cost_with_and_without_restarts():
    """Steps of 2, 2 and 1 devices: two starts, of which one is a restart."""
    log = tools.Availability(np.array([0.0, 1.0, 2.0, 3.0]), np.array([2, 2, 1, 0]))
    table = tools.convert_rows(log, tools.POLICIES["fixed"](batch_size=40))
    schedule = Schedule(Trace(table), 120, 10)
    step_time = StepTime(per_update=1.0, per_substep=2.0)
    steps = simulate(schedule, devices=table["devices"].to_numpy(), step_time=step_time)
    assert steps["num_substeps"].tolist() == [2, 2, 4]
    assert steps["seconds"].tolist() == [5, 5, 9]
    options = {"restart_seconds": 30, "compile_seconds": 7, "step_time": step_time}
    told = totals(steps, price=3.6, **options)
    assert told["restarts"] == 1
    expected = {
        "hours without": 19 / 3600, "device-hours without": (2 * 10 + 9) / 3600,
        "cost without": 29 / 1000, "hours with": (19 + 7 + 30 + 7) / 3600,
        "cost with": (29 + 2 * 7 + 30 + 7) / 1000,
    }  # fmt: skip
    found = {name: told[f"{name} restarts and compiling"] for name in expected}
    assert found == pytest.approx(expected)


def test_lost_replicas_cost_less_with_live_members():
    schedule = Schedule(Trace([20] * 180), 3600, 10)
    steps = simulate(schedule, step_time=StepTime(per_update=4.0, per_substep=8.0))
    assert steps["seconds"].sum() == 3600
    lost = {"restart_seconds": 100, "checkpoint_seconds": 600}
    # Two losses in an hour, each of 400 s or of 21 s: an hour of steps takes longer.
    told = tools.time_lost(steps, 2.0, **lost)
    assert told["hours lost with restarts"] == pytest.approx(1 / (1 - 2 / 9) - 1)
    assert told["hours lost with live members"] == pytest.approx(42 / (3600 - 42))
    # Steps of two seconds more: what a loss costs, too.
    told = tools.time_lost(steps, 2.0, **lost, exchange_seconds=2.0)
    live = told["hours lost with live members"]
    assert live == pytest.approx(1.1 / (1 - 46 / 3600) - 1)
    assert tools.time_lost(steps, 9.0, **lost)["hours lost with restarts"] == math.inf
    assert tools.time_lost(steps, 0.0, **lost)["hours lost with restarts"] == 0


def test_devices_of_rows_are_followed_round_the_trace():
    for on_end, expected in {"cycle": [1, 2, 1, 2], "hold": [1, 2, 2, 2]}.items():
        schedule = Schedule(Trace([10, 10]), 20, 10, on_end)
        steps = simulate(schedule, 2, devices=np.array([1, 2]))
        assert steps["devices"].tolist() == expected


# --- the step-time model: fitted to seconds, it tells those of other steps ------------

POSITIVE = st.floats(1e-3, 10.0)


@given(POSITIVE, POSITIVE, st.lists(st.integers(1, 20), min_size=2, max_size=9))
def test_exact_seconds_give_the_model_back(per_update, per_substep, substeps):
    model = StepTime(per_update, per_substep)
    found = fit_step_time(model.seconds(np.array(substeps)), substeps)
    if len(set(substeps)) > 1:
        assert found == pytest.approx(model)
    else:  # nothing tells the two apart, but these steps are told right
        assert found.per_update == 0
        assert found.seconds(substeps[0]) == pytest.approx(model.seconds(substeps[0]))


@given(
    st.lists(st.tuples(POSITIVE, st.integers(1, 20)), min_size=1, max_size=12),
    st.data(),
)
def test_no_other_model_has_a_smaller_squared_error(steps, data):
    seconds, substeps = map(np.array, zip(*steps))
    found = fit_step_time(seconds, substeps)
    assert min(found) >= 0

    def error(model: StepTime) -> float:
        return float(np.square(model.seconds(substeps) - seconds).sum())

    other = StepTime(data.draw(st.floats(0, 10)), data.draw(st.floats(0, 10)))
    assert error(found) <= error(other) + 1e-6


def test_several_steps_may_be_timed_together():
    """As where a device is waited for on logging steps alone."""
    model = StepTime(0.5, 0.125)
    substeps = np.array([[1, 2, 3], [4, 4, 4], [9, 1, 1]])
    found = fit_step_time(model.seconds(substeps).sum(1), substeps.sum(1), 3)
    assert found == pytest.approx(model)
