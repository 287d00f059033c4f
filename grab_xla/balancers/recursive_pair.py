"""Recursive pair balance: a tree of pairs over each batch."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from grab_xla.balancers.pair import BlockBalancer
from grab_xla.balancing.decisions import Decisions, squared_norms, without_nan
from xla_replica import computed_once, where_finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecursivePairBalance(BlockBalancer):
    """Sorts each block of ``batch_size`` samples by a tree of pair balancings.

    At every node neighbours are paired; of each pair one goes left and one right. All
    pairs of a node see its accumulator as it was before the block, so no sign depends
    on another. The next order takes column after column of the sorted blocks, every
    other one backwards.

    The state has an accumulator for every node; node v has the children 2v + 1 and
    2v + 2.

    Attributes:
        batch_size: The number of samples in a block, a power of two and at least 2. It
            is that of the steps where no samples shall be kept for the next one.
    """

    placement_dtype: ClassVar[torch.dtype] = torch.int32

    batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 2 or self.batch_size & (self.batch_size - 1):
            raise ValueError(
                f"batch_size={self.batch_size}: 'recursive-pair' needs a power of two"
            )

    @property
    def piece_size(self) -> int:  # type: ignore[override]
        return self.batch_size

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self.batch_size.bit_length() - 2

    @property
    def num_leaves(self) -> int:
        return self.batch_size

    def place_blocks(self, sums: Tensor, rows_RD: Tensor, decide: Decisions) -> Tensor:
        placements, clean = [], computed_once(without_nan(rows_RD))
        for rows, own in decide.parts(clean, self.batch_size):
            squares = squared_norms(rows).unsqueeze(1)
            inner = decide.whole(torch.cat([rows @ sums.T, squares], dim=1))
            # A sample that is not finite has products of 0 and is not added.
            finite = where_finite(inner[:, -1:])
            inner = torch.where(finite, inner, torch.zeros_like(inner))
            found = self._sort(inner[:, :-1], own)
            weights, placed = (each * finite for each in found)
            sums.addmm_(weights.T, rows)
            placements.append(placed.squeeze(1))
        return torch.cat(placements)

    def _sort(self, products_RV: Tensor, decide: Decisions) -> tuple[Tensor, Tensor]:
        """Returns the samples' signs at nodes, ``(b, V)``, and placements, ``(b, 1)``.

        ``places`` says where the tree has put each sample so far, node by node. What
        belongs to a node or a partner is found by comparing everything with it, because
        a TPU gathers and scatters numbers one by one.
        """
        like: dict[str, Any] = {"dtype": torch.int32, "device": products_RV.device}
        places = torch.arange(self.batch_size, **like)

        def of_partner(values: Tensor) -> Tensor:
            found = (places ^ 1).unsqueeze(1) == places
            return torch.where(found, values, torch.zeros_like(values)).sum(1)

        weights = []
        for level in range(self.depth + 1):
            depth = self.depth + 1 - level  # of the tree below a node of this level
            nodes = products_RV[:, 2**level - 1 : 2 ** (level + 1) - 1]
            is_node = (places >> depth).unsqueeze(1) == torch.arange(2**level, **like)
            own = torch.where(is_node, nodes, torch.zeros_like(nodes)).sum(1)
            other = of_partner(own)
            is_second = (places & 1).bool()
            limits = None
            if decide.thresholds_RN is not None:
                # The first's is the pair's.
                limits = decide.thresholds_RN[:, level]
                limits = torch.where(is_second, of_partner(limits), limits)
            differences = torch.where(is_second, other - own, own - other)
            goes_left = decide.below(differences, limits) ^ is_second
            signs = torch.where(goes_left, torch.ones_like(own), -torch.ones_like(own))
            signs = signs.unsqueeze(1)
            weights.append(torch.where(is_node, signs, torch.zeros_like(signs)))
            # Pairs stay in sequence within the half of the node that they go to.
            within = places & (2**depth - 1)
            right = (~goes_left).to(places.dtype) << (depth - 1)
            places = places - within + (within >> 1) + right
        placements = torch.where((places & 1).bool(), -places - 1, places + 1)
        return torch.cat(weights, dim=1), placements.unsqueeze(1)
