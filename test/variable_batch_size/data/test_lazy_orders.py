"""Orders that are never in memory: a bijection, uniform, and the same everywhere."""

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.variable_batch_size.wrapping import sampler_of

import variable_batch_size as vbs
from variable_batch_size.data.lazy_orders import SORTED

BILLION = 10**9


def order(epoch: int, size: int, seed: int = 0) -> np.ndarray:
    return vbs.IndexShuffle(seed).samples(epoch, size, np.arange(size))


def test_every_length_up_to_2000_and_some_greater_ones_have_a_bijection():
    for size in (*range(1, 2001), SORTED + 1, 2**16, 2**16 + 1, 999**2, 10**6 + 3):
        assert (np.bincount(order(3, size), minlength=size) == 1).all(), size


@given(st.integers(1, 2**62), st.integers(0, 2**32), st.data())
def test_samples_of_any_length_differ_and_are_in_range(size, seed, data):
    positions = st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True)
    drawn = np.array(data.draw(positions), dtype=np.int64)
    shuffle = vbs.IndexShuffle(seed)
    found = shuffle.samples(1, size, drawn)
    assert (len(np.unique(found)), found.dtype) == (len(drawn), np.int64)
    assert 0 <= found.min() <= found.max() < size
    one_by_one = [shuffle.samples(1, size, each)[0] for each in drawn[:, None]]
    assert found.tolist() == one_by_one


def test_the_shuffle_is_pinned():
    """Another one would break every run that is under way."""
    assert order(0, 6, seed=42).tolist() == [5, 1, 3, 0, 2, 4]
    found = vbs.IndexShuffle(42).samples(1, BILLION, np.arange(6))
    expected = [624658227, 281104834, 149060974, 67714606, 374764839, 804053296]
    assert found.tolist() == expected


def chi_square(observed: np.ndarray, expected: float) -> float:
    """Returns how many standard deviations chi-square is above its mean."""
    found, freedom = ((observed - expected) ** 2 / expected).sum(), observed.size - 1
    return (found - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_few_samples_are_equally_likely(size):
    seen = Counter(tuple(order(0, size, seed)) for seed in range(6000))
    every = np.array([seen[p] for p in itertools.permutations(range(size))])
    assert abs(chi_square(every, 6000 / len(every))) < 4


@pytest.mark.parametrize("size", [40, SORTED, 1100, 5003])
def test_positions_and_neighbours_are_uniform_over_seeds(size):
    """What a user would see: where samples land, who follows whom, who is together."""
    draws, positions = 1500, np.array([0, 1, 2, size // 2, size - 2, size - 1])
    orders = map(vbs.IndexShuffle, range(draws))
    found = np.stack([order.samples(0, size, positions) for order in orders]).T
    uniform = [(numbers, size) for numbers in found]
    quarter, quarters = found * 4 // size, np.bincount(np.arange(size) * 4 // size)
    together = np.outer(quarters, quarters) - np.diag(quarters)
    for one, other in ((0, 1), (1, 2), (4, 5), (0, 5)):
        # Differences of two different samples, modulo the size: 1 to size - 1.
        uniform.append(((found[other] - found[one]) % size - 1, size - 1))
        pairs = np.bincount(quarter[one] * 4 + quarter[other], minlength=16)
        expected = together.ravel() * draws / (size * (size - 1))
        assert abs(chi_square(pairs, expected)) < 5
    for numbers, end in uniform:  # on range(end), in 20 parts
        counts = np.bincount(numbers * 20 // end, minlength=20)
        expected = np.bincount(np.arange(end) * 20 // end) * draws / end
        assert abs(chi_square(counts, expected)) < 5


def test_epochs_and_seeds_are_unrelated():
    """Not even seed + 1 in epoch e and seed in epoch e + 1, or two near lengths."""
    size = 4096
    orders = [order(e, size, s) for e, s in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2))]
    orders.append(order(0, size + 1)[:size])
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 8  # one is expected
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / size**0.5


def first_steps(size: int, epoch: int, trace) -> int:
    """Returns the peak in bytes until a few minibatches."""
    tracemalloc.start()
    one = sampler_of(trace, size, order=vbs.IndexShuffle(7), on_end="hold")
    one.set_epoch(epoch)
    assert len([*itertools.islice(one, 100)]) == 100
    assert size // 32 - 32 <= len(one) <= size // 32
    state = one.state_dict()
    assert len(repr(state)) < 500
    one.load_state_dict({**state, "epoch": epoch, "step": size // 2048, "order": ""})
    next(iter(one))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    ("epoch", "trace"), [(0, 1024), (5, 1024), (0, [32, 64, 64, 1024]), (1, [32, 1024])]
)
def test_memory_does_not_grow_with_the_number_of_samples(epoch, trace):
    first_steps(BILLION, epoch, trace)  # what is allocated once
    small, large = (first_steps(size, epoch, trace) for size in (10**6, BILLION))
    assert large < min(2**18, small + 2**15)


class Order(vbs.LazyOrder):
    """One of somebody else, which may be another one in every object."""

    name = "of others"

    def __init__(self, of=lambda at: 255 - at) -> None:
        self.of = of

    def samples(self, epoch, num_samples, positions):
        return self.of(positions)


def test_orders_of_others():
    orders = Order(), Order(), Order(lambda at: (256 - at) % 256)
    one, again, other = (sampler_of(64, order=order) for order in orders)
    assert list(itertools.chain(*one)) == [*reversed(range(256))]
    state = {**one.state_dict(), "step": 2}
    again.load_state_dict(state)
    assert list(itertools.chain(*again)) == [*reversed(range(128))]
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="whose order differs from the saved one"):
        next(iter(other))


@pytest.mark.parametrize(("returned", "message"), [
    (lambda at: at[:-1], r"\(64,\) of .* got int64 \(63,"),
    (lambda at: at / 2, "got float64 "),
    (lambda at: at + 256, r"of range\(256\), .* array\(\[256, 257"),
])  # fmt: skip
def test_samples_that_cannot_be_are_refused(returned, message):
    with pytest.raises(ValueError, match=message):
        next(iter(sampler_of(64, order=Order(returned))))
