"""The step-time model: fitted to seconds, it tells those of other steps."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.replicas import row

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.trace_tools.families import make
from variable_batch_size.trace_tools.step_time import StepTime, fit_step_time

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


@settings(deadline=None)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "arrays of one length above 0, got shapes"),
        (([1.0], [1, 2]), "arrays of one length above 0, got shapes"),
        ((1.0, 1), "arrays of one length above 0, got shapes"),
        (([1.0, np.nan], [1, 2]), "seconds must be finite and >= 0"),
        (([1.0, -1.0], [1, 2]), "seconds must be finite and >= 0"),
        (([1.0, 1.0], [1, 0]), "num_substeps must be finite and >= 1"),
        (([1.0, 1.0], [1, 2], 0), "num_updates must be finite and >= 1"),
    ],
)
def test_what_cannot_be_fitted_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_step_time(*arguments)


def timed_run(rank: int, num_steps: int) -> tuple[list[float], list[int]]:
    """Trains on a random walk of batch sizes; returns seconds and substeps of steps."""
    replica = xla_replica.current()
    trace = make(
        "random-walk", steps=num_steps, first=256, least=32, most=1024,
        multiple_of=32, spread=0.5, seed=0,
    )  # fmt: skip
    sizes = [784, 1024, 1024, 10]
    layers = [torch.nn.Linear(n, m) for n, m in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(*layers).to(replica.device)
    sampler = vbs.CustomSampler(
        dataset_size=int(trace.batchsize.sum()), trace=trace, minibatch_size=32
    )
    optimizer = vbs.LinearRuleOptimizer(
        torch.optim.SGD(model.parameters(), 1e-4), sampler, 256
    )
    ends: list[float] = []

    def note(update: vbs.Update) -> None:
        replica.fetch([layers[0].bias.detach()[:1]])  # waits for the device
        ends.append(time.perf_counter())

    optimizer.attach(note)
    batch = replica.send(torch.randn(32, 784))
    begun = time.perf_counter()
    optimizer.set_epoch(0)
    for _ in sampler:
        model(batch).square().mean().backward()
        optimizer.step()
    seconds = np.diff([begun, *ends]).tolist()
    plan = sampler.plan
    return seconds, plan.num_substeps(0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("backend", [row("cpu", 1), row("cpu", 2), row("xla", 2)])
def test_one_half_of_a_run_tells_the_seconds_of_the_other(backend):
    num_steps = 200
    seconds, substeps = map(np.array, backend.run(timed_run, num_steps, timeout=300)[0])
    seconds, substeps = seconds[10:], substeps[10:]  # without compilation
    half = len(seconds) // 2
    model = fit_step_time(seconds[:half], substeps[:half])
    predicted = model.seconds(substeps[half:]).sum()
    error = predicted / seconds[half:].sum() - 1
    assert abs(error) < 0.15, (model, error)
