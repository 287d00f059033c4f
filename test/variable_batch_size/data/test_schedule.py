"""`Schedule`, compared with the slow, obvious way to deal minibatches."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Schedule, TraceExhausted
from variable_batch_size.traces.batch_trace import Trace, TraceError


def slow_epochs(sizes, capacity, on_end, num_epochs):
    """Returns lists of minibatches per step, epoch by epoch, one step at a time."""
    steps = {
        "stop": iter(sizes),
        "error": iter(sizes),
        "hold": itertools.chain(sizes, itertools.repeat(sizes[-1])),
        "cycle": itertools.cycle(sizes),
    }[on_end]
    epochs, epoch = [], []
    for size in steps:
        if sum(epoch) + size > capacity:
            epochs.append(epoch)
            epoch = []
        if len(epochs) == num_epochs:
            return epochs
        epoch.append(size)
    return [*epochs, epoch]


schedules = st.integers(1, 12).flatmap(
    lambda capacity: st.tuples(
        st.lists(st.integers(1, capacity), min_size=1, max_size=30),
        st.just(capacity),
        st.integers(1, 5),  # minibatch size
        st.integers(0, 4),  # samples beyond the last whole minibatch
    )
)


@settings(deadline=None)
@given(schedules, st.sampled_from(["stop", "error", "hold", "cycle"]))
def test_epochs_equal_the_slow_way(drawn, on_end):
    sizes, capacity, unit, rest = drawn
    num_samples = capacity * unit + min(rest, unit - 1)
    schedule = Schedule(
        Trace([n * unit for n in sizes]), num_samples, unit, on_end=on_end
    )
    expected = slow_epochs(sizes, capacity, on_end, num_epochs=40)
    first = 0
    for epoch, steps in enumerate(expected[:40]):
        plan = schedule.plan(epoch, 3)
        assert plan.num_minibatches.tolist() == steps
        assert plan.first_step == first
        assert plan.num_dropped_samples == num_samples - unit * sum(steps)
        assert [plan.batch_size(t) for t in range(plan.num_steps)] == [
            n * unit for n in steps
        ]
        first += len(steps)
    if on_end in ("hold", "cycle"):
        assert schedule.num_epochs == math.inf
    else:
        assert schedule.num_epochs == len(expected)


def dealt(plan, rank: int, padded: bool) -> list[int]:
    """Returns the minibatches that a sampler deals to a replica in the first epoch."""
    unit = plan.minibatch_size
    sampler = CustomSampler(
        dataset_size=plan.num_samples, trace=plan.batch_sizes, minibatch_size=unit,
        num_replicas=plan.num_replicas, rank=rank, order=range(plan.num_samples),
        verbose=False,
    )  # fmt: skip
    if padded:
        sampler.pad_steps()
    return [rows[0] // unit for rows in sampler]


@settings(deadline=None)
@given(schedules, st.integers(1, 5), st.booleans())
def test_every_minibatch_is_dealt_once_and_the_rest_is_padding(
    drawn, num_replicas, padded
):
    """Minibatch k goes to replica k mod R, so no sample is used twice in an epoch."""
    sizes, capacity, unit, _ = drawn
    schedule = Schedule(Trace([n * unit for n in sizes]), capacity * unit, unit)
    plan = schedule.plan(0, num_replicas)
    plan = dataclasses.replace(plan, padded=padded)
    counted = []
    for rank in range(num_replicas):
        expected = []
        for step, n in enumerate(plan.num_minibatches.tolist()):
            longest = -(-n // num_replicas)
            mine = longest if padded else len(range(rank, n, num_replicas))
            assert plan.num_substeps(rank)[step] == mine
            for substep in range(mine):
                number = substep * num_replicas + rank
                first = int(plan.starts[step])
                expected.append(first + min(number, n - 1))
                is_padding = plan.num_real_samples(rank, step, substep) == 0
                assert is_padding == (number >= n)
                counted += [] if is_padding else expected[-1:]
        assert plan.minibatches(rank).tolist() == expected
        assert dealt(plan, rank, padded) == expected
    assert sorted(counted) == list(range(plan.starts[-1]))
    idle = any(0 in plan.num_substeps(rank) for rank in range(num_replicas))
    assert plan.has_idle_replicas == idle


@settings(deadline=None)
@given(schedules)
def test_epochs_can_be_asked_for_in_any_order(drawn):
    sizes, capacity, unit, _ = drawn
    trace = Trace([n * unit for n in sizes])
    late_first = Schedule(trace, capacity * unit, unit, "cycle")
    in_order = Schedule(trace, capacity * unit, unit, "cycle")
    late = late_first.plan(17, 2)
    for epoch in range(17):
        in_order.plan(epoch, 2)
    assert late.first_step == in_order.plan(17, 2).first_step


def test_past_the_end_of_the_trace():
    assert Schedule(Trace([64, 64]), 128, 32).num_epochs == 1  # exactly
    constant = Schedule(Trace(64), 256, 32)
    assert constant.num_epochs == math.inf
    assert constant.plan(1000, 1).first_step == 4000
    stop = Schedule(Trace([64, 64, 64]), 128, 32)
    assert stop.num_epochs == 2
    assert stop.plan(1, 1).num_steps == 1  # the last epoch is shorter
    assert stop.plan(2, 1).num_steps == 0
    assert stop.plan(2, 1).first_step == 3
    error = Schedule(Trace([64, 64, 64]), 128, 32, on_end="error")
    assert error.plan(1, 1).num_steps == 1
    with pytest.raises(TraceExhausted, match=r"last of the 3 steps .* fill 2 epochs"):
        error.plan(2, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((40, 256, 32), TraceError, r"minibatch_size=32; .* 32 or 64\. With pad_mini"),
        ((8, 256, 32), TraceError, "multiple of minibatch_size=32; nearest is 32"),
        ((512, 256, 32), TraceError, "exceeds epoch capacity: 256 samples hold 8 mini"),
        ((288, 287, 32), TraceError, "exceeds epoch capacity"),
        ((32, 31, 32), ValueError, "31 samples, fewer than one minibatch"),
        ((32, 256, 0), ValueError, "minibatch_size must be an integer >= 1, got 0"),
        ((32, 256, True), TypeError, "minibatch_size must be an integer .* got True"),
        ((32, 256, 32, "loop"), ValueError, "on_end must be one of 'stop', .* 'loop'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    trace, *rest = arguments
    with pytest.raises(error, match=message):
        Schedule(Trace([trace]), *rest)


def test_an_epoch_is_a_number_from_zero():
    with pytest.raises(ValueError, match="epoch must be an integer >= 0, got -1"):
        Schedule(Trace([32]), 256, 32).plan(-1, 1)


def test_ten_million_steps_are_a_prefix_sum():
    """Memory is linear and no loop runs over steps; benchmarks measure the seconds."""
    trace = Trace(np.resize([64, 128, 256, 32], 10**7))
    schedule = Schedule(trace, 60_000, 32, on_end="cycle")
    plan = schedule.plan(0, 8)
    assert plan.starts[-1] <= schedule.capacity
    assert len(schedule._prefix) == 10**7 + 1
