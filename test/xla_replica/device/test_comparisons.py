"""Comparisons on a lazy device are those of the host, without float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.xla_replica.replicas import row

import xla_replica

VALUES = [0.0, -1.5, 3e38, float("inf"), float("-inf"), float("nan")]
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


@pytest.mark.parametrize("backend", [row("cpu", 1), row("xla", 1)])
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
