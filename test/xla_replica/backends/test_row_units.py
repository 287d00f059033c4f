"""Integers in units of rows, against exact sums of Python's floats."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.xla_replica.replicas import GPUS, TORCHTPU, Backend, row

import xla_replica
from xla_replica import DeviceTraits, Replica
from xla_replica.device import device_traits, row_units
from xla_replica.device.row_units import RowTotal, RowUnits, SmallSum

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# By their number: rows of two numbers.
ROWS = {n: st.lists(NUMBERS, min_size=2 * n, max_size=2 * n) for n in (1, 2, 3)}
LOCAL = xla_replica.LocalReplica("cpu")


def units_of(replica: Replica = LOCAL, num_minibatches: int = 9, **peaks) -> RowUnits:
    units = RowUnits(replica)
    state = {name: torch.tensor(peak) for name, peak in peaks.items()}
    units.extend({name: torch.empty(len(peak), 2) for name, peak in state.items()})
    units.load_state_dict(state)
    units.begin(num_minibatches)
    return units


def added(units: RowUnits, *tensors: torch.Tensor, name: str = "w") -> RowTotal:
    """Returns the total of tensors of as many minibatches."""
    total = units.total(name, tensors[0])
    for tensor in tensors:
        total.add_(tensor)
        units.end_minibatch()
    return total


def summed(units: RowUnits, *tensors: torch.Tensor) -> RowTotal:
    """Returns the total of a step, which is run again if the units say so."""
    total = added(units, *tensors)
    if units.measure():
        units.follow()
        units.begin(len(tensors))
        total = added(units, *tensors)
        assert not units.measure()
    return total


def mean_of(units: RowUnits, total: RowTotal, like: torch.Tensor, count: int = 1):
    return total.mean_into_(torch.empty_like(like), units.divisors(count))


@settings(deadline=None)
@given(st.integers(1, 3).flatmap(lambda n: st.lists(ROWS[n], min_size=1)))
@example([[3e38, -3e38, 1e30, 1e-3], [-3e38, -3e38, 1e-30, 0.0]])
@example([[1e-45, 1e-40, -0.0, 0.0], [2e-38, 0.0, -0.0, 0.0]])
@example([[2.0**60 - 2.0**36, 1.0]] * 255)
@example([[2.0**60, -(2.0**60)]] * 300)
def test_means_are_those_of_fsum(columns):
    """Before they are rounded to float32, errors are 2^-22 of the row's largest."""
    rows = [torch.tensor(each).view(-1, 2) for each in columns]
    units = units_of(num_minibatches=len(rows), w=[0.0] * len(rows[0]))
    mean = mean_of(units, summed(units, *rows), rows[0], len(rows))
    values = torch.stack(rows).double()
    tops = values.abs().amax((0, 2))
    for index, top in enumerate(tops.maximum(tops.max() / 4).tolist()):
        for column in range(2):
            terms = values[:, index, column].tolist()
            expected = math.fsum(terms) / len(terms)
            error = max(top / 2**22, 2.0**-100) + abs(expected) / 2**22
            assert abs(mean[index, column].item() - expected) <= error


@pytest.mark.parametrize("is_host", [True, False])
def test_units_are_of_steps_before_and_always_finite(is_host, monkeypatch):
    monkeypatch.setitem(device_traits._TRAITS, "cpu", DeviceTraits(is_host=is_host))
    x = torch.tensor([[1.0, -3.0], [0.5, 0.5]])
    units = units_of(w=[0.0, 0.0], idle=[2.0])
    summed(units, x)
    units.follow()
    state = units.state_dict()
    assert state["w"].tolist() == [3.0, 0.75]  # a quarter of the tensor's at least
    assert state["idle"].tolist() == [2.0]  # nothing was seen of it
    # Four bits of growth at nine minibatches where the peak is 3.
    for scale, fits in [(21.3, True), (21.4, False), (2**-6, True), (2**-7, False)]:
        units = units_of(w=[3.0, 3.0])
        added(units, x * scale)
        assert units.measure().item() != fits
    for bad in (math.nan, math.inf, -math.inf):
        units = units_of(w=[3.0, 3.0])
        total = added(units, x, torch.tensor([[bad, 2.0], [1.0, 2.0]]))
        assert not units.measure()
        mean = mean_of(units, total, x, 2)
        assert mean[0].isnan().all()
        assert mean[1].tolist() == [0.75, 1.25]
        units.follow()
        peaks = units.state_dict()["w"].tolist()
        assert peaks == [3.0, pytest.approx(3.0 * 2**-0.125)]


@pytest.mark.parametrize("num_minibatches", [1, 15, 255, 256, 2048])
def test_every_step_may_grow_by_a_bit(num_minibatches):
    units = units_of(num_minibatches=num_minibatches, w=[1.0])
    x = torch.tensor([[2 - 2**-20, -2 + 2**-21]])
    total = added(units, *num_minibatches * [x])
    assert not units.measure()
    mean = mean_of(units, total, x, num_minibatches)
    torch.testing.assert_close(mean, x, atol=0, rtol=2**-23)


def integers(rank: int, rows: list[Any]) -> tuple[list[int], torch.Tensor]:
    """Returns a total in units, and its mean, on the replica's device."""
    replica = xla_replica.current()
    units = units_of(replica, w=[1.0, 1.0])
    total = added(units, *(replica.send(torch.tensor(each)) for each in rows))
    units.measure()
    parts = [each.clone() for each in total.parts]
    mean = mean_of(units, total, replica.send(torch.tensor(rows[0])))
    [low, mean] = replica.fetch([*parts, mean])
    return low.tolist(), mean


@pytest.mark.parametrize("backend", [row("xla", 1), *GPUS, *TORCHTPU])
def test_integers_are_those_of_all_devices(backend):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 2, (9, 2, 400), generator=generator)
    rows = torch.randn(9, 2, 400, generator=generator) * torch.exp2(exponents.float())
    rows[:, :, :3] = torch.tensor([0.0, 15.99, 1e-41])
    [(found, mean)] = backend.run(integers, rows.tolist())
    [(expected, mean_of_host)] = Backend("cpu", 1).run(integers, rows.tolist())
    assert found == expected
    torch.testing.assert_close(mean, mean_of_host, atol=0, rtol=2**-22)


def test_more_than_float32_is_not_for_small_sums():
    values = torch.tensor([2.0**-126, -(2.0**127), 1.0 + 2**-23, 0.0, math.pi])
    assert torch.equal(row_units.value_of(row_units.digits_of(values)), values)
    terms = [1e30, 1.0, -1e30, 1e-30]
    for order in (terms, terms[::-1]):
        sums = SmallSum(1, torch.float32, LOCAL, is_exact=True)
        for term in order:
            sums.add(torch.tensor([term]))
        assert sums.value().item() == math.fsum(terms)
    sums.spoil()
    assert sums.value().isnan().all()
