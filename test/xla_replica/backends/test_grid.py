"""Integers on a grid, against exact sums of Python's floats and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.xla_replica.replicas import GPUS, TORCHTPU, Backend, row

import xla_replica
from xla_replica import DeviceTraits
from xla_replica.backends.grid import Grid, Total
from xla_replica.backends.small_sum import SmallSum, digits_of, value_of
from xla_replica.device import device_traits

NORMAL = st.floats(-(2.0**100), 2.0**100, width=32).filter(
    lambda x: x == 0 or abs(x) > 2.0**-60
)


def grid_of(*names: str, **exponents: int) -> Grid:
    grid = Grid(names, xla_replica.LocalReplica("cpu"))
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
    for _ in range(2):
        total = added(grid, *tensors)
        if not grid.measure():
            return total
        grid.follow()
    raise AssertionError("the maxima of a step do not fit the grid that was made of it")


@given(st.lists(st.lists(NORMAL, min_size=3, max_size=3), min_size=1, max_size=9))
def test_means_are_those_of_fsum(rows):
    """Before the result is rounded to float32 the error is 2^-27 of the largest."""
    grid, result = grid_of("w"), torch.empty(3)
    tensors = [torch.tensor(each) for each in rows]
    total = summed(grid, *tensors)
    total.mean_into_(result, grid.divisors(len(tensors)))
    largest = max(abs(x) for each in rows for x in each)
    unit = Fraction(1 / grid.up[0])
    for column in range(3):
        exact = sum(Fraction(each[column]) for each in rows) / len(rows)
        mean = Fraction(total.parts[0][column].item()) * unit / len(rows)
        assert abs(mean - exact) <= Fraction(largest) / 2**27
        fsum = math.fsum(each[column] for each in rows) / len(rows)
        assert abs(result[column].item() - fsum) <= largest / 2**27 + abs(fsum) / 2**24


@pytest.fixture(params=["the host", "an eager accelerator"])
def _wide(request, monkeypatch):
    """Takes the CPU for each kind of device whose floats of 64 bits are native."""
    traits = DeviceTraits(is_host=request.param == "the host")
    monkeypatch.setitem(device_traits._TRAITS, "cpu", traits)


@pytest.mark.usefixtures("_wide")
def test_a_grid_is_of_the_step_before():
    grid, x = grid_of("w", "idle"), torch.tensor([1.0, -3.0])
    summed(grid, x)
    grid.follow()
    assert grid.state_dict() == {"w": 2}  # below 2^2, and the other has none
    for scale, fits in [(21.3, True), (21.4, False), (2**-13, True), (2**-14, False)]:
        grid = grid_of("w", w=2)
        added(grid, x * scale)
        assert grid.measure().item() != fits


@pytest.mark.usefixtures("_wide")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan_and_leaves_the_grid(bad):
    grid, result = grid_of("w", w=2), torch.empty(2)
    total = added(grid, torch.tensor([1.0, 2.0]), torch.tensor([bad, 2.0]))
    assert not grid.measure()
    total.mean_into_(result, grid.divisors(2))
    assert result.isnan().all()
    grid.follow()
    assert grid.state_dict() == {"w": 2}


@pytest.mark.usefixtures("_wide")
@pytest.mark.parametrize(
    "values", [[3e38, -3e38], [1e-45, 1e-40], [0.0, 0.0], [1e30, 1e-30], [-0.0, 2e-38]]
)
def test_extremes_fit_into_a_grid_of_their_own(values):
    grid, x = grid_of("w"), torch.tensor(values)
    result = summed(grid, x, x).mean_into_(torch.empty(2), grid.divisors(2))
    largest = x.abs().max().item()
    assert (result - x).abs().max().item() <= max(largest / 2**27, 2.0**-120)


def integers(rank: int, rows: list[list[float]], exponent: int) -> list[int]:
    """Returns a total in units, and its mean, on the replica's device."""
    replica = xla_replica.current()
    grid = Grid(["w"], replica)
    grid.load_state_dict({"w": exponent})
    total = added(grid, *(replica.send(torch.tensor(each)) for each in rows))
    grid.measure()
    empty = torch.empty(len(rows[0]), device=replica.device)
    result = total.mean_into_(empty, grid.divisors())
    *parts, mean = [t.tolist() for t in replica.fetch([*total.parts, result])]
    if len(parts) == 2:
        return [(high << 20) + low for high, low in zip(*parts)], mean
    return [int(x) for x in parts[0]], mean


@pytest.mark.parametrize("backend", [row("xla", 1), *GPUS, *TORCHTPU])
def test_integers_are_those_of_all_devices(backend):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 4, (9, 400), generator=generator)
    rows = torch.randn(9, 400, generator=generator) * torch.exp2(exponents.float())
    rows[:, :3] = torch.tensor([0.0, 15.99, 1e-41])
    [found], [expected] = (
        each.run(integers, rows.tolist(), 0) for each in (backend, Backend("cpu", 1))
    )
    assert found[0] == expected[0]
    means = torch.tensor(found[1]), torch.tensor(expected[1])
    torch.testing.assert_close(*means, atol=0, rtol=2**-22)


def test_more_than_float32_is_not_for_small_sums():
    values = torch.tensor([2.0**-126, -(2.0**127), 1.0 + 2**-23, 0.0, math.pi])
    assert torch.equal(value_of(digits_of(values)), values)
    replica = xla_replica.LocalReplica("cpu")
    sums = SmallSum(1, torch.float32, replica, is_exact=True)
    terms = [1e30, 1.0, -1e30, 1e-30]
    for order in (terms, terms[::-1]):
        sums.total.zero_()
        for term in order:
            sums.add(torch.tensor([term]))
        assert sums.value().item() == math.fsum(terms)
    sums.spoil()
    assert sums.value().isnan().all()
