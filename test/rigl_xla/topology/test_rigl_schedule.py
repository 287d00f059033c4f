"""When topology updates happen, how much they change, and sparsities per layer."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rigl_xla.resnet import RESNET50_WEIGHTS

from rigl_xla import ANNEALINGS, DISTRIBUTIONS, UpdateSchedule, allocate
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import num_inactive


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


# Few scores, so that many are equal; that of an active weight of zero is one of them.
VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1e-30, 1e30])
NUMBERS = st.lists(st.tuples(st.booleans(), VALUES, VALUES), min_size=1, max_size=12)


def best(scores: list[float], eligible: list[bool], count: int) -> list[bool]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    chosen = [i for i in order if eligible[i]][:count]
    return [i in chosen for i in range(len(scores))]


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


SHAPES = {
    "stem": (8, 3, 3, 3), "wide": (64, 8, 3, 3), "thin": (16, 64, 1, 1),
    "body": (64, 256), "head": (10, 64),
}  # fmt: skip


def sizes(shapes):
    return {name: math.prod(shape) for name, shape in shapes.items()}


def num_active(shapes, sparsities):
    return sum(n - num_inactive(sparsities[i], n) for i, n in sizes(shapes).items())


RATIOS = {
    "er": lambda shape: (shape[0] + shape[1]) / (shape[0] * shape[1]),
    "erk": lambda shape: sum(shape) / math.prod(shape),
}


@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.8, 0.9, 0.99])
def test_erdos_renyi_solves_for_the_budget(kind, sparsity):
    """Densities are min(1, epsilon ratio), here with epsilon by bisection."""
    numbers = sizes(SHAPES)
    ratios = {name: RATIOS[kind](shape) for name, shape in SHAPES.items()}
    budget = sum(n - math.floor(Fraction(str(sparsity)) * n) for n in numbers.values())
    low, high = 0.0, 1e9
    for _ in range(200):
        epsilon = (low + high) / 2
        used = sum(min(1, epsilon * ratios[name]) * numbers[name] for name in SHAPES)
        low, high = (epsilon, high) if used < budget else (low, epsilon)
    expected = {name: 1 - min(1, low * ratio) for name, ratio in ratios.items()}
    assert allocate(SHAPES, sparsity, kind) == pytest.approx(expected, abs=1e-9)
    assert allocate(SHAPES, sparsity, kind.upper()) == allocate(SHAPES, sparsity, kind)


def test_uniform_keeps_the_first_layer_dense_and_a_function_what_it_says():
    assert list(allocate(SHAPES, 0.9).values()) == [0, 0.9, 0.9, 0.9, 0.9]
    assert allocate({"only": (4, 4)}, 0.5) == {"only": 0.5}
    assert set(allocate(SHAPES, 0.9, dense_first=False).values()) == {0.9}
    found = allocate(SHAPES, 0.5, lambda free, s, dense: dict.fromkeys(free, s / 2))
    assert set(found.values()) == {0.25}


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.95])
def test_adjusted_uniform_reaches_the_sparsity_of_the_whole(sparsity):
    found = allocate(SHAPES, sparsity, "adjusted-uniform", {"head": 0.0})
    inactive = sum(found[name] * n for name, n in sizes(SHAPES).items())
    assert inactive == pytest.approx(sparsity * sum(sizes(SHAPES).values()))
    assert found["stem"] == found["head"] == 0


@pytest.mark.parametrize(("options", "name", "sparsity"), [
    ({"fixed": {"body": 0.5}}, "body", 0.5), ({"dense_first": True}, "stem", 0),
])  # fmt: skip
def test_overrides_are_outside_of_the_budget(options, name, sparsity):
    rest = {other: shape for other, shape in SHAPES.items() if other != name}
    found = allocate(SHAPES, 0.8, "erk", **options)
    assert found == {name: sparsity, **allocate(rest, 0.8, "erk")}


@given(st.integers(1, 99), st.sampled_from([10, 50, 100, 1000, 9408, 10**6]))
def test_counts_are_those_of_the_decimal_that_was_meant(percent, size):
    exact = min(percent * size // 100, size - 1)
    assert num_inactive(percent / 100, size) == exact
    assert num_inactive(1 - (100 - percent) / 100, size) == exact


MATRICES = st.lists(st.tuples(*[st.integers(1, 40)] * 2), min_size=1, max_size=6)
KINDS = st.sampled_from(sorted(set(DISTRIBUTIONS) - {"adjusted-uniform"}))


@given(MATRICES, st.floats(0, 0.99), KINDS)
def test_every_distribution_stays_in_range_and_budget(shapes, sparsity, kind):
    named = {str(index): shape for index, shape in enumerate(shapes)}
    found = allocate(named, sparsity, kind, dense_first=False)
    assert all(0 <= value < 1 for value in found.values())
    excess = num_active(named, found) - (1 - sparsity) * sum(sizes(named).values())
    assert -1 <= excess <= 2 * len(shapes)  # each layer rounds, and keeps one


@pytest.mark.parametrize(("sparsity", "num_dense", "erk", "uniform"), [
    (0.8, 8, 5_100_630, 5_108_133),
    (0.9, 1, 2_550_353, 2_558_785),
    (0.95, 0, 1_275_200, 1_284_111),
])  # fmt: skip
def test_resnet50_is_that_of_the_paper(sparsity, num_dense, erk, uniform):
    assert len(RESNET50_WEIGHTS) == 54
    assert sum(sizes(RESNET50_WEIGHTS).values()) == 25_502_912
    found = allocate(RESNET50_WEIGHTS, sparsity, "erk")
    assert [*found.values()].count(0) == num_dense
    both = found, allocate(RESNET50_WEIGHTS, sparsity)
    assert [num_active(RESNET50_WEIGHTS, each) for each in both] == [erk, uniform]
