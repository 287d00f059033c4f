"""`Schedule`, compared with the slow, obvious way to deal minibatches."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size.data.schedule import EpochPlan, Schedule
from variable_batch_size.traces.batch_trace import Trace


def slow_epochs(sizes, capacity, on_end, num_epochs):
    """Returns the batch sizes of every epoch, one step at a time."""
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


def counted(plan: EpochPlan) -> Iterator[tuple[int, int]]:
    """Yields (step, sample) of all minibatches: k goes to replica k mod R."""
    replicas = range(plan.num_replicas)
    substeps = [plan.num_substeps(rank).tolist() for rank in replicas]
    assert plan.has_idle_replicas == any(0 in own for own in substeps)
    assert not plan.padded or substeps == substeps[:1] * plan.num_replicas
    for rank, own in enumerate(substeps):
        for step, substep in ((s, k) for s, n in enumerate(own) for k in range(n)):
            rows = plan.samples_of(step, substep * plan.num_replicas + rank)
            rows = np.arange(plan.num_samples)[rows]
            num_real = plan.num_real_samples(rank, step, substep)
            assert num_real == len(rows) > 0 or (plan.padded and num_real == 0)
            yield from ((step, sample) for sample in rows[:num_real])


schedules = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(
        st.lists(st.integers(1, capacity), min_size=1, max_size=30),
        st.just(capacity),
        st.integers(1, 9),  # minibatch size
        st.integers(0, 8),  # samples beyond the last whole minibatch
        st.integers(1, 5),  # replicas
    )
)


@given(
    schedules, st.sampled_from(["stop", "hold", "cycle"]),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_epochs_asked_for_in_any_order_equal_the_slow_way(
    drawn, on_end, fills_up, padded, last_first
):
    """Every sample of a step counts once; in a padded plan no replica is idle."""
    sizes, capacity, unit, rest, replicas = drawn
    num_samples = capacity * unit + min(rest, unit - 1)
    if fills_up:  # minibatches, with which batch sizes need not be multiples
        num_samples = capacity
    else:
        sizes = [n * unit for n in sizes]
    schedule = Schedule(Trace(sizes), num_samples, unit, on_end, fills_up)
    expected = slow_epochs(sizes, num_samples, on_end, num_epochs=20)
    firsts = itertools.accumulate(map(len, expected), initial=0)
    before = itertools.accumulate(map(sum, expected), initial=0)
    epochs = [*zip(range(20), expected, firsts, before)]
    for epoch, steps, first, num_before in epochs[:: -1 if last_first else 1]:
        plan = dataclasses.replace(schedule.plan(epoch, replicas), padded=padded)
        assert [plan.batch_size(step) for step in range(plan.num_steps)] == steps
        assert plan.num_minibatches.tolist() == [math.ceil(n / unit) for n in steps]
        assert (plan.first_step, schedule.samples_before(first)) == (first, num_before)
        assert plan.num_dropped_samples == num_samples - sum(steps)
        of_steps = zip(np.repeat(range(len(steps)), steps), range(num_samples))
        assert sorted(counted(plan)) == [*of_steps]
    endless = on_end in ("hold", "cycle")
    assert schedule.num_epochs == (math.inf if endless else len(expected))


def test_past_the_end_of_the_trace():
    constant = Schedule(Trace(np.int64(64)), 256, 32)
    assert constant.num_epochs == math.inf
    assert constant.plan(1000, 1).first_step == 4000
    ended = Schedule(Trace([64, 64, 64]), 128, 32)
    assert [ended.plan(epoch, 1).num_steps for epoch in (0, 1, 2)] == [2, 1, 0]
