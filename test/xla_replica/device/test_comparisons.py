"""Comparisons on a lazy device are those of the host, without float64."""

from __future__ import annotations

import pytest
import torch
from support.xla_replica.replicas import needs_xla

import xla_replica

VALUES = [0.0, -1.5, 3e38, float("inf"), float("-inf"), float("nan")]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def compared(rank: int) -> tuple[list[list[list[bool]]], list[str]]:
    """Returns what is finite and what is below one, and the programs that say so."""
    del rank
    replica = xla_replica.current()
    found, programs = [], []
    for dtype in DTYPES:
        values = replica.send(torch.tensor(VALUES, dtype=dtype))
        made = [
            xla_replica.where_finite(values),
            values < xla_replica.comparable(1.0, values),
        ]
        if replica.is_lazy:
            import torch_xla

            programs.append(torch_xla._XLAC._get_xla_tensors_hlo(made))
        found.append([each.tolist() for each in replica.fetch(made)])
    return found, programs


def check(found: list[list[list[bool]]]) -> None:
    for finite, below in found:
        assert finite == [True, True, True, False, False, False]
        assert below == [True, True, False, False, True, False]


def test_on_the_host():
    found, _ = compared(0)
    check(found)


@needs_xla
@pytest.mark.xla
def test_on_xla_only_float64_is_compared_in_float64():
    [(found, programs)] = xla_replica.launch(compared, (), 1, "xla")
    check(found)
    assert ["f64" in program for program in programs] == [False, False, True]


def summed_twice(rank: int) -> tuple[list[list[float]], str]:
    """Returns two sums of numbers that are computed once, and their program."""
    del rank
    replica = xla_replica.current()
    values = replica.send(torch.tensor([1.0, -2.0]))
    once = xla_replica.computed_once(values * 3)
    made = [once + 1, once.sum()]
    program = ""
    if replica.is_lazy:
        import torch_xla

        program = torch_xla._XLAC._get_xla_tensors_hlo(made)
    return [each.tolist() for each in replica.fetch(made)], program


def test_what_is_computed_once_is_as_it_was():
    assert summed_twice(0)[0] == [[4.0, -5.0], -3.0]


@needs_xla
@pytest.mark.xla
def test_a_program_computes_once_what_it_is_told_to():
    [(found, program)] = xla_replica.launch(summed_twice, (), 1, "xla")
    assert found == [[4.0, -5.0], -3.0]
    assert program.count(" opt-barrier(") == 1
