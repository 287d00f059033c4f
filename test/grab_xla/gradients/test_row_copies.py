"""Rows that a loop on the device copies are those that a reshape gives."""

from __future__ import annotations

import pytest
import torch
from support.xla_replica.replicas import needs_xla

import xla_replica
from grab_xla.gradients.row_copies import flattened, interleaved

# 36 rows are joined four at a time, 35 one at a time.
SHAPES = [(3,), (3, 5), (3, 7, 5), (3, 36, 5), (2, 35, 3), (2, 48, 1), (2, 32, 3, 3)]


def copies(rank: int) -> list[list[torch.Tensor]]:
    """Returns flattened and interleaved values of every shape and some dtypes."""
    del rank
    replica = xla_replica.current()
    found = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            values = replica.send(torch.arange(torch.Size(shape).numel()).to(dtype))
            values = values.view(shape)
            made = [flattened(values)]
            if len(shape) == 3:
                made.append(interleaved(values))
            found.append(replica.fetch(made))
    return found


def check(found: list[list[torch.Tensor]]) -> None:
    found = iter(found)
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            flat, *others = next(found)
            values = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
            assert flat.dtype == dtype
            assert flat.tolist() == [row.flatten().tolist() for row in values]
            for other in others:
                rows = [values[w, b] for b in range(shape[1]) for w in range(shape[0])]
                assert other.tolist() == torch.stack(rows).tolist()


def test_on_the_host():
    check(copies(0))


@needs_xla
@pytest.mark.xla
def test_on_xla():
    check(xla_replica.launch(copies, (), 1, "xla")[0])
