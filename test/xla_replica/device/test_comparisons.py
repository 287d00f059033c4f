"""Comparing and selecting on a device, against Python on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.xla_replica.replicas import row

import xla_replica
from xla_replica.device.selection import first, kth_largest

ONE_REPLICA = [row("cpu", 1), row("xla", 1)]
INF = float("inf")
VALUES = [0.0, -1.5, 3e38, INF, -INF, float("nan")]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def compared(rank: int) -> tuple[list[list[Any]], list[str]]:
    """Returns what is finite and below one by dtype, and two sums of what is computed
    once; and the programs that say so."""
    del rank
    replica = xla_replica.current()
    found, programs = [], []

    def note(*made: torch.Tensor) -> None:
        if replica.is_lazy:
            import torch_xla

            programs.append(torch_xla._XLAC._get_xla_tensors_hlo([*made]))
        found.append([each.tolist() for each in replica.fetch(made)])

    for dtype in DTYPES:
        values = replica.send(torch.tensor(VALUES, dtype=dtype))
        one = xla_replica.comparable(1.0, values)
        note(xla_replica.where_finite(values), values < one)
    once = xla_replica.computed_once(replica.send(torch.tensor([1.0, -2.0])) * 3)
    note(once + 1, once.sum())
    return found, programs


@pytest.mark.parametrize("backend", ONE_REPLICA)
def test_comparisons_are_the_hosts_and_only_those_of_float64_in_float64(backend):
    """And on torch_xla what is to be computed once is one barrier in the program."""
    [(found, programs)] = backend.run(compared)
    *by_dtype, sums = found
    for finite, below in by_dtype:
        assert finite == [True, True, True, False, False, False]
        assert below == [True, True, False, False, True, False]
    assert sums == [[4.0, -5.0], -3.0]
    if backend.device == "xla":
        *programs, of_sums = programs
        assert ["f64" in program for program in programs] == [False, False, True]
        assert of_sums.count(" opt-barrier(") == 1


ROWS = {
    "floats": torch.tensor([[0.5, -2.0, 3.0, 3.0, -0.25], [1.0, 2.0, 3.0, 4.0, 5.0]]),
    "equal": torch.full((2, 5), -7.5),
    "zeros of both signs": torch.tensor([[0.0, -0.0, 0.0, -0.0, 1.0]] * 2),
    "infinite": torch.tensor([[INF, -INF, 3e38, -3e38, 0.0]] * 2),
    "bfloat16": torch.tensor([[0.5, -2.0, 3.0, 3.0, -0.25]] * 2).bfloat16(),
    "float64": torch.tensor([[1.0, 1 + 1e-12, 1 - 1e-12, 0, 2]] * 2).double(),
    "int32": torch.tensor([[2**31 - 1, -(2**31), 0, -1, 7]] * 2, dtype=torch.int32),
}


def selected(rank: int) -> dict[str, list[Any]]:
    """Returns the second and the fourth, the fifth and the first of each pair of rows.

    And, as "first", the first true ones of a mask.

    Raises AssertionError if another count compiles anything.
    """
    del rank
    replica = xla_replica.current()
    found: dict[str, list[Any]] = {}
    for name, rows in ROWS.items():
        values = replica.send(rows)
        for counts in ([2, 4], [5, 1]):
            wanted = replica.send(torch.tensor(counts).unsqueeze(1))
            replica.sync()
            with xla_replica.count(replica) as count:
                largest = kth_largest(values, wanted)
                replica.sync()
            assert count.transfers == 0
            assert not (name in found and count.compilations)
            [host] = replica.fetch([largest])
            found.setdefault(name, []).append(host.flatten().tolist())
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]]).bool()
    counts = torch.tensor([[2], [0], [1]])
    found["first"] = replica.fetch([first(*map(replica.send, (mask, counts)))])
    return found


@pytest.mark.parametrize("backend", ONE_REPLICA)
def test_the_largest_are_those_of_a_sorted_list(backend):
    [found] = backend.run(selected)
    expected = [[False, True, True, False, False], [False] * 5, [False, True] + 3 * [0]]
    assert found["first"][0].tolist() == expected
    for name, rows in ROWS.items():
        a, b = (sorted(each, reverse=True) for each in rows.tolist())
        assert found[name] == [[a[1], b[3]], [a[4], b[0]]], name
