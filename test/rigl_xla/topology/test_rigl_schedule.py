"""When topology updates happen, and how much they change."""

from __future__ import annotations

import itertools
import math

import pytest

from rigl_xla import ANNEALINGS, METHODS, UpdateSchedule
from rigl_xla.topology.update_schedule import gradual_sparsity
from rigl_xla.update.steps import collects


def test_updates_every_delta_steps_before_the_end():
    schedule = UpdateSchedule(T_end=12, delta=3)
    assert [t for t in range(-9, 30) if schedule.is_update(t)] == [3, 6, 9]
    assert schedule.last_update == 9


@pytest.mark.parametrize("delta", [1, 2, 3, 5, 20])
def test_snfs_collects_up_to_the_last_update_and_not_while_states_are_made(delta):
    schedule = UpdateSchedule(T_end=17, delta=delta)
    found = [t for t in range(1, 40) if collects(METHODS["snfs"], schedule, t)]
    assert found == list(range(3 if delta > 2 else 1, schedule.last_update + 1))
    assert schedule.last_update == {1: 16, 2: 16, 3: 15, 5: 15, 20: 0}[delta]


def test_a_topology_without_an_end_never_changes():
    schedule = UpdateSchedule(T_end=None)
    assert not any(schedule.is_update(t) or schedule.collects(t) for t in range(999))
    assert schedule.drop_fraction(100) == 0


@pytest.mark.parametrize(
    ("n", "delta"), [(1, 1), (1, 2), (1, 5), (2, 2), (2, 5), (4, 5), (5, 5)]
)
def test_gradients_are_collected_in_the_last_n_steps_up_to_an_update(n, delta):
    schedule = UpdateSchedule(T_end=17, delta=delta, grad_accumulation_n=n)
    updates = [t for t in range(1, 40) if schedule.is_update(t)]
    expected = {t for update in updates for t in range(update - n + 1, update + 1)}
    assert {t for t in range(1, 40) if schedule.collects(t)} == expected


def test_cosine_drop_fraction():
    schedule = UpdateSchedule(T_end=1000, alpha=0.3)
    for step in range(0, 1000, 50):
        expected = 0.3 / 2 * (1 + math.cos(math.pi * step / 1000))
        assert schedule.drop_fraction(step) == pytest.approx(expected, rel=1e-12)
    assert schedule.drop_fraction(1000) == schedule.drop_fraction(2000) == 0
    assert schedule.num_dropped(0, 99) == 29


@pytest.mark.parametrize("annealing", ANNEALINGS)
def test_every_annealing_begins_at_alpha_and_does_not_rise(annealing):
    schedule = UpdateSchedule(T_end=100, alpha=0.4, annealing=annealing)
    fractions = [schedule.drop_fraction(t) for t in range(100)]
    assert fractions[0] == pytest.approx(0.4)
    assert all(a >= b >= 0 for a, b in itertools.pairwise(fractions))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"T_end": 0}, ValueError, "T_end must be an integer >= 1, got 0"),
        ({"T_end": 7.5}, TypeError, "must be an integer"),
        ({"delta": 0}, ValueError, "delta must be .*, got 0"),
        ({"delta": True}, TypeError, "must be an integer"),
        ({"alpha": 2}, ValueError, ">= 0 and <= 1"),
        ({"alpha": float("nan")}, ValueError, ">= 0 and <= 1"),
        ({"alpha": None}, TypeError, "must be a finite number"),
        ({"grad_accumulation_n": 101}, ValueError, "from 1 to delta"),
        ({"annealing": "warm"}, ValueError, "must be one of"),
    ],
)
def test_errors_say_what_is_allowed(arguments, error, says):
    with pytest.raises(error, match=says):
        UpdateSchedule(**{"T_end": 1000, **arguments})


def test_gradual_sparsity_rises_from_first_to_last():
    values = [gradual_sparsity(t, 0.9, 10, 30, 0.1) for t in range(40)]
    assert values[:11] == [pytest.approx(0.1)] * 11
    assert values[30:] == [pytest.approx(0.9)] * 10
    assert values == sorted(values)
