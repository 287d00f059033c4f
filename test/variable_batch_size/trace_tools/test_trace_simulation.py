"""A simulated run has the steps, samples and learning rates of the real one."""

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.variable_batch_size.elastic import Case, Training
from support.xla_replica.replicas import row

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


def planned(sizes: Any, *arguments: Any, **options: Any) -> Schedule:
    return Schedule(Trace(sizes), *arguments, **options)


def real_runs(rank: int, case: Case) -> dict[str, Any]:
    runs = {}
    for rule, optimizer in RULES.items():
        training = Training(dataclasses.replace(case, rule=rule, optimizer=optimizer))
        training.train()
        told = [(u.epoch, u.step, u.batch_size, u.lr[0]) for u in training.updates]
        runs[rule] = (told, len(training.samples))
    return runs


@pytest.mark.parametrize("backend", [row("cpu", 3), row("xla", 2, slow=True)])
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


PADDED = planned([10, 25, 13], 60, 10, pad_minibatches=True)
# 40 + 40 of 100 samples, 40 + 60, and then the trace ends after 20.
ENDING = planned([40, 40, 40, 60, 20], 100, 20)
ENDLESS = pd.DataFrame({"samples": [0, 128], "batchsize": [64, 96]})
NOISE = {"rule": "adascale", "ref_batchsize": 8, "noise_scale": 24.0, "lr": 0.5}
GAINS = np.array([1, 2 * 32 / 40, 4 * 32 / 56])
MEASURED = simulate(planned([8, 16, 32], 56, 8), **NOISE)
# Steps of 2, 2 and 1 devices: two starts, of which one is a restart.
FEWER, FEWER_TIME = np.array([2, 2, 1]), StepTime(per_update=1.0, per_substep=2.0)
RESTARTED = simulate(planned([40] * 3, 120, 10), devices=FEWER, step_time=FEWER_TIME)
COSTS = {"restart_seconds": 30, "compile_seconds": 7, "price": 3.6}
COLUMNS = [
    (PADDED, {"rule": "linear", "ref_batchsize": 10, "devices": 2}, {
        "batch_size": [10, 25, 13], "samples": [10, 35, 48], "lr": [1, 2.5, 1.3],
        "num_substeps": [1, 2, 1],
    }),
    (MEASURED, {}, {"gain": GAINS, "progress": GAINS.cumsum(), "lr": 0.5 * GAINS}),
    (RESTARTED, {}, {"num_substeps": [2, 2, 4], "seconds": [5, 5, 9]}),
    *((planned([10, 10], 20, 10, on_end), {"devices": FEWER[1:], "num_epochs": 2},
       {"devices": expected})
      for on_end, expected in (("cycle", [2, 1, 2, 1]), ("hold", [2, 1, 1, 1]))),
]  # fmt: skip
NUMBERS = [
    (check(PADDED, 2), {"samples": 48, "steps": 3, "samples of padding": 5 + 7}),
    (check(ENDING, 4), {
        "epochs": 3, "dropped samples": 20, "dropped samples in per cent": 10,
        "samples of the last epoch after the trace's end": 80,
        "idle replica-substeps": 2 + 2 + 2 + 1 + 3,
    }),
    (check(ENDING, 1, num_epochs=1), {
        "steps of the trace that are not used": 3, "dropped samples": 20,
        "idle replica-substeps": 0,
    }),
    (check(ENDING, np.array([2, 2, 1, 3, 1])), {"idle replica-substeps": 0}),
    (stats(Trace([64, 96, 96, 32])), {
        "largest minibatch size": 32, "changes": 2, "mean batch size": 72,
        "median batch size": 80, "steps": 4, "samples": 288,
    }),
    (stats(Trace(ENDLESS)), {
        "steps": 2, "samples": 128, "mean batch size": 64,
        "has no end": True,
    }),
    (stats(Trace(64)), {"steps": 0, "samples": 0, "mean batch size": 64}),
    (totals(MEASURED), {"progress in steps at the reference": sum(GAINS)}),
    (totals(RESTARTED, **COSTS), {
        "restarts": 1, "hours without restarts and compiling": 19 / 3600,
        "device-hours without restarts and compiling": (2 * 10 + 9) / 3600,
        "cost without restarts and compiling": 29 / 1000,
        "hours with restarts and compiling": (19 + 7 + 30 + 7) / 3600,
        "cost with restarts and compiling": (29 + 2 * 7 + 30 + 7) / 1000,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "options", "expected"), COLUMNS)
def test_columns_are_those_that_are_counted_by_hand(steps, options, expected):
    if isinstance(steps, Schedule):
        steps = simulate(steps, **options)
    for name, values in expected.items():
        assert steps[name].tolist() == pytest.approx([*values]), name


@pytest.mark.parametrize(("told", "expected"), NUMBERS)
def test_numbers_are_those_that_are_counted_by_hand(told, expected):
    assert {name: told[name] for name in expected} == pytest.approx(expected)


# --- the step-time model: fitted to seconds, it tells those of other steps ------------

POSITIVE = st.floats(1e-3, 10.0)


@given(
    POSITIVE, POSITIVE, st.lists(st.integers(1, 20), min_size=2, max_size=9),
    st.integers(1, 3),
)  # fmt: skip
def test_exact_seconds_give_the_model_back(per_update, per_substep, substeps, updates):
    """Several steps may be timed together, as where a device is waited for then."""
    model = StepTime(per_update, per_substep)
    seconds = per_update * updates + per_substep * np.array(substeps)
    found = fit_step_time(seconds, substeps, updates)
    if len(set(substeps)) > 1:
        assert found == pytest.approx(model)
    else:  # nothing tells the two apart, but these steps are told right
        assert found.per_update == 0
        assert found.seconds(substeps[0]) == pytest.approx(seconds[0])


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
