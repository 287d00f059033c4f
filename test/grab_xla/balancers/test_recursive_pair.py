"""The tree of pairs: its signs, and its program on a compiled backend."""

from __future__ import annotations

import pytest
import torch
from support.xla_replica.replicas import needs_xla

import xla_replica
from grab_xla.balancers.recursive_pair import RecursivePairBalance
from grab_xla.balancing.decisions import TIES, Decisions


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("has_thresholds", [False, True])
@pytest.mark.parametrize("size", [2, 4, 32, 256])
def test_a_block_is_sorted_as_by_an_oracle(size, has_thresholds, tie):
    draw = torch.Generator().manual_seed(size)  # many ties
    rows, thresholds = (
        torch.randint(-2, 3, (size, n), generator=draw).double() for n in (size - 1, 9)
    )
    rows[0] *= 1e150  # the rows are their products with the sums
    sums = torch.eye(size - 1).double()
    decide = Decisions(tie, thresholds_RN=thresholds if has_thresholds else None)
    tree = RecursivePairBalance(batch_size=size)
    placements = tree.balance_blocks(sums, rows, decide)
    signs = torch.zeros_like(rows)

    def sort(items, node, level):
        if len(items) == 1:
            return items
        left, right = [], []
        for x, y in zip(items[0::2], items[1::2]):
            difference = rows[x, node] - rows[y, node]
            limit = thresholds[x, level] if has_thresholds else 0.0
            wins = difference < limit or (tie == "positive" and difference == limit)
            left.append(x if wins else y)
            right.append(y if wins else x)
        signs[left, node], signs[right, node] = 1.0, -1.0
        children = (2 * node + 1, left), (2 * node + 2, right)
        return [i for child, part in children for i in sort(part, child, level + 1)]

    leaves = sort(list(range(size)), 0, 0)
    torch.testing.assert_close(sums, torch.eye(size - 1).double() + signs.T @ rows)
    for leaf, sample in enumerate(leaves):
        assert placements[sample] == (leaf + 1 if leaf % 2 == 0 else -leaf - 1)


def balanced(rank: int) -> tuple[list[torch.Tensor], str]:
    """Returns placements and accumulators of two blocks, and the program."""
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
