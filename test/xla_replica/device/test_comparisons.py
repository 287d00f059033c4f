"""Comparing and selecting on a device, against Python on the host."""

from typing import Any

import pytest
import torch
from support.xla_replica.replicas import row

import xla_replica
from xla_replica.device.selection import first, kth_largest

ONE_REPLICA = [row("cpu", 1), row("xla", 1)]
INF = float("inf")


def compared(rank: int) -> list[str]:
    """Asserts what comparisons give; returns the programs of a lazy device."""
    replica, programs = xla_replica.current(), []

    def gives(expected: list[Any], *made: torch.Tensor) -> None:
        if replica.is_lazy:
            import torch_xla

            programs.append(torch_xla._XLAC._get_xla_tensors_hlo([*made]))
        assert [each.tolist() for each in replica.fetch(made)] == expected

    numbers = torch.tensor([0.0, -1.5, 3e38, INF, -INF, float("nan")])
    finite, below = [i < 3 for i in range(6)], [i in (0, 1, 4) for i in range(6)]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = replica.send(numbers.to(dtype))
        one = xla_replica.comparable(1.0, values)
        gives([finite, below], xla_replica.where_finite(values), values < one)
    once = xla_replica.computed_once(replica.send(torch.tensor([1.0, -2.0])) * 3)
    gives([[4.0, -5.0], -3.0], once + 1, once.sum())
    return programs


@pytest.mark.parametrize("backend", ONE_REPLICA)
def test_comparisons_are_the_hosts_and_only_those_of_float64_in_float64(backend):
    """And on torch_xla what is to be computed once is one barrier in the program."""
    [programs] = backend.run(compared)
    if backend.device == "xla":
        *programs, of_sums = programs
        assert ["f64" in program for program in programs] == [False, False, True]
        assert of_sums.count(" opt-barrier(") == 1


ROWS = (
    torch.tensor([[0.5, -2.0, 3.0, 3.0, -0.25], [1.0, 2.0, 3.0, 4.0, 5.0]]),
    torch.full((2, 5), -7.5),
    torch.tensor([[0.0, -0.0, 0.0, -0.0, 1.0], [INF, -INF, 3e38, -3e38, 0.0]]),
    torch.tensor([[0.5, -2.0, 3.0, 3.0, -0.25]] * 2).bfloat16(),
    torch.tensor([[1.0, 1 + 1e-12, 1 - 1e-12, 0, 2]] * 2).double(),
    torch.tensor([[2**31 - 1, -(2**31), 0, -1, 7]] * 2, dtype=torch.int32),
)


def selects(rank: int) -> None:
    """Asserts which numbers are largest, or first true; no count compiles anew."""
    replica = xla_replica.current()
    for rows in ROWS:
        a, b = (sorted(each, reverse=True) for each in rows.tolist())
        values = replica.send(rows)
        for is_first, i, j in ((True, 2, 4), (False, 5, 1)):
            wanted = replica.send(torch.tensor([[i], [j]]))
            replica.sync()
            with xla_replica.count(replica) as count:
                largest = kth_largest(values, wanted)
                replica.sync()
            assert count.transfers == 0
            assert is_first or not count.compilations
            found = replica.fetch([largest])[0].flatten().tolist()
            assert found == [a[i - 1], b[j - 1]]
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]]).bool()
    counts = torch.tensor([[2], [0], [1]])
    [found] = replica.fetch([first(*map(replica.send, (mask, counts)))])
    assert found.int().tolist() == [[0, 1, 1, 0, 0], [0] * 5, [0, 1, 0, 0, 0]]


@pytest.mark.parametrize("backend", ONE_REPLICA)
def test_the_largest_are_those_of_a_sorted_list(backend):
    assert backend.run(selects) == [None]
