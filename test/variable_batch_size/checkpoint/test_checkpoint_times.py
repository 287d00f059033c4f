"""`SaveTimes`: minutes become updates, which are the same on every replica."""

from __future__ import annotations

import itertools

import pytest
from support.xla_replica.replicas import SEVERAL_REPLICAS

import xla_replica
from variable_batch_size.checkpoint.save_and_stop import SaveTimes


class Clock:
    """A clock that each update advances by the time it takes on this replica."""

    def __init__(self, seconds_per_update) -> None:
        self.now, self._takes = 0.0, seconds_per_update

    def __call__(self) -> float:
        return self.now

    def update(self, number: int) -> None:
        self.now += self._takes(number)


def saves(takes, num_updates, every_updates=None, every_minutes=None):
    """Returns the updates to save after, with their times, and how often it looked."""
    clock = Clock(takes)
    times = SaveTimes(xla_replica.current(), every_updates, every_minutes, clock)
    found, looks = [], 0
    for number in range(1, num_updates + 1):
        clock.update(number)
        looks += number >= times._next_look and every_minutes is not None
        if times.due(number):
            found.append((number, clock.now))
            times.saved(number)
    return found, looks


def test_updates_are_counted_from_the_beginning_of_training():
    assert [number for number, _ in saves(lambda n: 1.0, 35, 10)[0]] == [10, 20, 30]
    times = SaveTimes(xla_replica.current(), 10, None)
    times.saved(14)  # a run that was resumed
    assert [n for n in range(15, 45) if times.due(n)] == [20, 30, 40]


@pytest.mark.parametrize(
    "takes",
    [
        lambda number: 0.05,
        lambda number: 30.0 if number < 3 else 0.05,  # the first ones compile
        lambda number: 0.01 if number % 400 < 200 else 0.2,  # the batch size changes
        lambda number: 100.0,  # an update takes longer than the interval
    ],
)
def test_minutes_are_met_with_few_looks(takes):
    found, looks = saves(takes, 20_000, every_minutes=1)
    instants = [0.0, *(now for _, now in found)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(instants)]
    longest = max(takes(number) for number in range(1, 1000))
    assert found
    assert all(60 <= gap <= 60 + max(20, longest) for gap in gaps)
    assert looks <= 70 * (len(found) + 1)


def on_replicas(rank: int) -> list:
    # The clock of replica 1 runs three times as fast.
    found, _ = saves(lambda number: 0.1 * (1 + 2 * (rank == 1)), 2000, None, 0.5)
    return [number for number, _ in found]


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_replicas_save_after_the_same_updates_whatever_their_clocks_say(backend):
    outcomes = backend.run(on_replicas)
    assert outcomes[0]
    assert all(outcome == outcomes[0] for outcome in outcomes)
