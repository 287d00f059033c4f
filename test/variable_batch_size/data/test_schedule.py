"""`Schedule`, compared with the slow, obvious way to deal minibatches."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.data.schedule import Schedule
from variable_batch_size.traces.batch_trace import Trace


def slow_epochs(sizes, capacity, on_end, num_epochs):
    """Returns lists of minibatches per step, epoch by epoch, one step at a time."""
    steps = {
        "stop": iter(sizes),
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


@given(schedules, st.sampled_from(["stop", "hold", "cycle"]), st.booleans())
def test_epochs_asked_for_in_any_order_equal_the_slow_way(drawn, on_end, last_first):
    sizes, capacity, unit, rest = drawn
    num_samples = capacity * unit + min(rest, unit - 1)
    trace = Trace([n * unit for n in sizes])
    schedule = Schedule(trace, num_samples, unit, on_end=on_end)
    expected = slow_epochs(sizes, capacity, on_end, num_epochs=40)
    firsts = itertools.accumulate(map(len, expected), initial=0)
    epochs = [*zip(range(40), expected, firsts)]
    for epoch, steps, first in epochs[:: -1 if last_first else 1]:
        plan = schedule.plan(epoch, 3)
        assert plan.num_minibatches.tolist() == steps
        assert plan.first_step == first
        assert plan.num_dropped_samples == num_samples - unit * sum(steps)
        found = [plan.batch_size(t) for t in range(plan.num_steps)]
        assert found == [n * unit for n in steps]
    endless = on_end in ("hold", "cycle")
    assert schedule.num_epochs == (math.inf if endless else len(expected))


def test_past_the_end_of_the_trace():
    constant = Schedule(Trace(np.int64(64)), 256, 32)
    assert constant.num_epochs == math.inf
    assert constant.plan(1000, 1).first_step == 4000
    ended = Schedule(Trace([64, 64, 64]), 128, 32)
    assert [ended.plan(epoch, 1).num_steps for epoch in (0, 1, 2)] == [2, 1, 0]
