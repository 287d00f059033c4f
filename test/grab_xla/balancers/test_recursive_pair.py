"""The tree of pairs sorted by masks, for compilers, is the one sorted by gathers."""

from __future__ import annotations

import pytest
import torch
from support.xla_replica.replicas import needs_xla

import xla_replica
from grab_xla.balancers.recursive_pair import RecursivePairBalance
from grab_xla.balancing.decisions import TIES, Decisions


def drawn(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns products with many ties, and thresholds."""
    draw = torch.Generator().manual_seed(size)
    products = torch.randint(-2, 3, (size, size - 1), generator=draw).double()
    products[0] *= 1e300  # so large that no product with zero is formed of it
    return products, torch.randint(-2, 3, (size, 9), generator=draw).double()


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("has_thresholds", [False, True])
@pytest.mark.parametrize("size", [2, 4, 32, 256])
def test_masks_sort_as_gathers_do(size, has_thresholds, tie):
    tree = RecursivePairBalance(batch_size=size)
    products, thresholds = drawn(size)
    given = products, thresholds if has_thresholds else None, Decisions(tie)
    signs, placements = tree._sort(*given)
    found_signs, found_placements = tree._sort_by_masks(*given)
    assert torch.equal(found_signs, signs)
    assert torch.equal(found_placements.long(), placements.long())
    # Every sample passes one node of each level, and every leaf gets one.
    assert signs.abs().sum(1).tolist() == [size.bit_length() - 1] * size
    assert sorted(placements.abs().flatten().tolist()) == list(range(1, size + 1))


def balanced(rank: int) -> tuple[list[torch.Tensor], str]:
    """Returns placements and accumulators of two blocks, and the program."""
    del rank
    replica = xla_replica.current()
    tree = RecursivePairBalance(batch_size=8)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(16, 5, generator=draw)
    rows[3, 2] = float("inf")
    sums = replica.send(torch.zeros(7, 5))
    made = [tree.balance_blocks(sums, replica.send(rows), Decisions()), sums]
    program = ""
    if replica.is_lazy:
        import torch_xla

        program = torch_xla._XLAC._get_xla_tensors_hlo(made)
    return replica.fetch(made), program


@needs_xla
@pytest.mark.xla
def test_on_xla_blocks_are_those_of_the_host_without_64_bits():
    (placements, sums), _ = balanced(0)
    [((found_placements, found_sums), program)] = xla_replica.launch(
        balanced, (), 1, "xla"
    )
    assert found_placements.tolist() == placements.tolist()
    torch.testing.assert_close(found_sums, sums)
    assert placements[3] == 0
    for slow in (" gather(", " scatter(", "f64[", "s64["):
        assert slow not in program, slow
