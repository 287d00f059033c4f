"""Integers on a grid, against exact sums of Python's floats and fractions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.xla_replica.replicas import GPUS, TORCHTPU, Backend, row

import xla_replica
from xla_replica import DeviceTraits, Replica
from xla_replica.backends.grid import Grid, Total
from xla_replica.backends.small_sum import SmallSum, digits_of, value_of
from xla_replica.device import device_traits

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LOCAL = xla_replica.LocalReplica("cpu")


def grid_of(*names: str, replica: Replica = LOCAL, **exponents: int) -> Grid:
    grid = Grid(names, replica)
    grid.load_state_dict(exponents)
    return grid


def added(grid: Grid, *tensors: torch.Tensor) -> Total:
    """Returns the total of tensors of as many minibatches."""
    total = Total(grid, "w", tensors[0])
    for tensor in tensors:
        total.add_(tensor)
        grid.end_minibatch()
    return total


def summed(grid: Grid, *tensors: torch.Tensor) -> Total:
    """Returns the total of a step, which is run again if the grid says so."""
    total = added(grid, *tensors)
    if grid.measure():
        grid.follow()
        total = added(grid, *tensors)
        assert not grid.measure()
    return total


@given(st.lists(st.tuples(*3 * [NUMBERS]), min_size=1, max_size=9))
@example([[3e38, -3e38, 1e30], [-3e38, -3e38, 1e-30]])
@example([[1e-45, 1e-40, -0.0], [2e-38, 0.0, -0.0]])
def test_means_are_those_of_fsum(rows):
    """Before the result is rounded to float32 the error is 2^-27 of the largest."""
    grid = grid_of("w")
    total = summed(grid, *map(torch.tensor, rows))
    result = total.mean_into_(torch.empty(3), grid.divisors(len(rows))).tolist()
    # Denormal numbers may count as zero.
    error = max(max(abs(x) for each in rows for x in each) / 2**27, 2.0**-120)
    unit = Fraction(1 / grid.up[0])
    for units, rounded, column in zip(total.parts[0].tolist(), result, zip(*rows)):
        exact = sum(map(Fraction, column)) / len(rows)
        assert abs(Fraction(units) * unit / len(rows) - exact) <= error
        assert abs(rounded - exact) <= error + abs(exact) / 2**24


@pytest.mark.parametrize("is_host", [True, False])
def test_a_grid_is_of_the_step_before_and_what_is_not_finite_leaves_it(
    is_host, monkeypatch
):
    """On each kind of device whose floats of 64 bits are native."""
    monkeypatch.setitem(device_traits._TRAITS, "cpu", DeviceTraits(is_host=is_host))
    grid, x = grid_of("w", "idle"), torch.tensor([1.0, -3.0])
    summed(grid, x)
    grid.follow()
    assert grid.state_dict() == {"w": 2}  # below 2^2, and the other has none
    for scale, fits in [(21.3, True), (21.4, False), (2**-13, True), (2**-14, False)]:
        grid = grid_of("w", w=2)
        added(grid, x * scale)
        assert grid.measure().item() != fits
    for bad in (math.nan, math.inf, -math.inf):
        grid = grid_of("w", w=2)
        total = added(grid, x, torch.tensor([bad, 2.0]))
        assert not grid.measure()
        assert total.mean_into_(torch.empty(2), grid.divisors(2)).isnan().all()
        grid.follow()
        assert grid.state_dict() == {"w": 2}


def integers(rank: int, rows: list[list[float]]) -> tuple[list[int], torch.Tensor]:
    """Returns a total in units, and its mean, on the replica's device."""
    replica = xla_replica.current()
    grid = grid_of("w", replica=replica, w=0)
    total = added(grid, *(replica.send(torch.tensor(each)) for each in rows))
    grid.measure()
    empty = torch.empty(len(rows[0]), device=replica.device)
    mean = total.mean_into_(empty, grid.divisors())
    high, *low, mean = replica.fetch([*total.parts, mean])
    return ((high.long() << 20 * len(low)) + sum(low)).tolist(), mean


@pytest.mark.parametrize("backend", [row("xla", 1), *GPUS, *TORCHTPU])
def test_integers_are_those_of_all_devices(backend):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 4, (9, 400), generator=generator)
    rows = torch.randn(9, 400, generator=generator) * torch.exp2(exponents.float())
    rows[:, :3] = torch.tensor([0.0, 15.99, 1e-41])
    [(found, mean)] = backend.run(integers, rows.tolist())
    [(expected, mean_of_host)] = Backend("cpu", 1).run(integers, rows.tolist())
    assert found == expected
    torch.testing.assert_close(mean, mean_of_host, atol=0, rtol=2**-22)


def test_more_than_float32_is_not_for_small_sums():
    values = torch.tensor([2.0**-126, -(2.0**127), 1.0 + 2**-23, 0.0, math.pi])
    assert torch.equal(value_of(digits_of(values)), values)
    terms = [1e30, 1.0, -1e30, 1e-30]
    for order in (terms, terms[::-1]):
        sums = SmallSum(1, torch.float32, LOCAL, is_exact=True)
        for term in order:
            sums.add(torch.tensor([term]))
        assert sums.value().item() == math.fsum(terms)
    sums.spoil()
    assert sums.value().isnan().all()
