"""Selecting by a count on the device, against a sort of lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.xla_replica.replicas import row

import xla_replica
from xla_replica.device.selection import first, kth_largest

INF = float("inf")
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


@pytest.mark.parametrize("backend", [row("cpu", 1), row("xla", 1)])
def test_the_largest_are_those_of_a_sorted_list(backend):
    [found] = backend.run(selected)
    expected = [[False, True, True, False, False], [False] * 5, [False, True] + 3 * [0]]
    assert found["first"][0].tolist() == expected
    for name, rows in ROWS.items():
        a, b = (sorted(each, reverse=True) for each in rows.tolist())
        assert found[name] == [[a[1], b[3]], [a[4], b[0]]], name
