"""When topology updates happen, and how much they change."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rigl_xla import ANNEALINGS, METHODS, UpdateSchedule
from rigl_xla.topology import masks
from rigl_xla.topology.update_schedule import gradual_sparsity
from rigl_xla.update.steps import collects


@pytest.mark.parametrize("delta", [1, 2, 3, 5, 20])
def test_snfs_collects_up_to_the_last_update_and_not_while_states_are_made(delta):
    schedule = UpdateSchedule(T_end=17, delta=delta)
    found = [t for t in range(1, 40) if collects(METHODS["snfs"], schedule, t)]
    assert found == list(range(3 if delta > 2 else 1, 16 // delta * delta + 1))


def test_a_topology_without_an_end_never_changes():
    schedule = UpdateSchedule(T_end=None)
    assert not any(schedule.is_update(t) or schedule.collects(t) for t in range(999))
    assert schedule.drop_fraction(100) == 0


@pytest.mark.parametrize(
    ("n", "delta"), [(1, 1), (1, 2), (1, 5), (2, 2), (2, 5), (4, 5), (5, 5)]
)
def test_updates_are_every_delta_steps_and_n_up_to_each_have_a_gradient(n, delta):
    schedule = UpdateSchedule(T_end=17, delta=delta, grad_accumulation_n=n)
    updates = [t for t in range(-9, 40) if schedule.is_update(t)]
    assert updates == [*range(delta, 17, delta)]
    assert schedule.last_update == updates[-1]
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


def test_gradual_sparsity_rises_from_first_to_last():
    values = [gradual_sparsity(t, 0.9, 10, 30) for t in range(40)]
    assert values[:11] == [0.0] * 11
    assert values[30:] == [pytest.approx(0.9)] * 10
    assert values == sorted(values)


# Few scores, so that many are equal; that of an active weight of zero is one of them.
VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1e-30, 1e30])


def best(scores: list[float], eligible: list[bool], count: int) -> list[bool]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    chosen = [i for i in order if eligible[i]][:count]
    return [i in chosen for i in range(len(scores))]


NUMBERS = st.lists(st.tuples(st.booleans(), VALUES, VALUES), min_size=1, max_size=12)


@settings(max_examples=300)
@given(numbers=NUMBERS, num_layers=st.integers(1, 2), data=st.data())
def test_the_kernel_equals_the_slow_one(numbers, num_layers, data):
    mask, drop, grow = map(list, zip(*numbers))
    dropped = data.draw(st.integers(0, sum(mask)))
    keep = best(drop, mask, sum(mask) - dropped)
    expected = best(grow, [not k for k in keep], dropped)
    given = mask, drop, grow, sum(mask) - dropped, dropped
    found, _ = masks.drop_and_grow(*(torch.tensor([x] * num_layers) for x in given))
    assert found.tolist() == [[k or g for k, g in zip(keep, expected)]] * num_layers
    assert found.sum(1).tolist() == [sum(mask)] * num_layers


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), data=st.data())
def test_rows_keep_their_number_of_connections(seed, rows, data):
    width = data.draw(st.integers(1, 8))
    per_row = data.draw(st.integers(1, width))
    num_keep = data.draw(st.integers(0, rows * per_row))
    draw = torch.Generator().manual_seed(seed)
    drop, grow = torch.randint(0, 5, (2, rows, width), generator=draw).float()
    chances = torch.rand(rows, width, generator=draw)
    mask = masks.top(chances, torch.full((rows,), per_row))
    counts = torch.tensor([[num_keep], [0]])  # each row grows as many as it lacks
    found, _ = masks.drop_and_grow(mask, drop, grow, *counts, per_row)
    keep = best(drop.flatten().tolist(), mask.flatten().tolist(), num_keep)
    for row in range(rows):
        kept = keep[row * width : (row + 1) * width]
        left = [not k for k in kept]
        grown = best(grow[row].tolist(), left, per_row - sum(kept))
        assert found[row].tolist() == [k or g for k, g in zip(kept, grown)]


def test_initial_masks_have_as_many_connections_and_depend_on_seed_and_name_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    mask = masks.random_mask(0, "fc.weight", 1000, 137)
    assert int(mask.sum()) == 137
    assert torch.equal(before, torch.get_rng_state())
    for other in (1, "fc.weight"), (0, "head.weight"):
        assert not torch.equal(mask, masks.random_mask(*other, 1000, 137))
    # A literal, so that a run resumes under another release: do not change it lightly.
    assert masks.random_mask(0, "fc.weight", 8, 3).nonzero().tolist() == [[4], [6], [7]]
