"""Recursive balance: every half of a balancing is balanced again."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from grab_xla.balancers.mean import MeanBalance
from grab_xla.balancing.decisions import Decisions
from xla_replica.common.arguments import check_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecursiveBalance(MeanBalance):
    """Sends samples from the root of a binary tree to a leaf by their signs at nodes.

    Every node has an accumulator; +1 leads to the left. The next order is that of the
    leaves, each with its positives as they came and its negatives reversed. Depth 0 is
    mean balance.

    The state is that of mean balance with 2^(depth + 1) - 1 accumulators; node v has
    the children 2v + 1 and 2v + 2.

    Attributes:
        depth: The number of levels below the root.
    """

    placement_dtype: ClassVar[torch.dtype] = torch.int32

    depth: int = 5  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_integer("depth", self.depth, 0)

    @property
    def num_draws(self) -> int:
        return self.depth + 1

    @property
    def num_leaves(self) -> int:
        return 2**self.depth

    def walk(
        self,
        gram_RR: Tensor,
        products_RV: Tensor,
        finite_R: Tensor,
        thresholds_RN: Tensor | None,
        decide: Decisions,
    ) -> tuple[Tensor, Tensor]:
        """Returns the signs, 0 at nodes that a sample does not pass, and placements.

        Level by level, samples at the same node are decided one after the other.
        """
        like = {"dtype": torch.int32, "device": gram_RR.device}  # TPUs emulate int64
        nodes = torch.arange(products_RV.shape[1], **like)
        node = torch.zeros_like(finite_R, dtype=nodes.dtype)
        signs_RV = torch.zeros_like(products_RV)
        signs = finite_R
        for level in range(self.depth + 1):
            is_here = node.unsqueeze(1) == nodes
            products = torch.where(is_here, products_RV, torch.zeros_like(products_RV))
            together = node.unsqueeze(1) == node
            signs = decide.signs(
                products.sum(1),
                torch.where(together, gram_RR, torch.zeros_like(gram_RR)),
                finite_R,
                None if thresholds_RN is None else thresholds_RN[:, level],
            )
            signs_RV = signs_RV + is_here * signs.unsqueeze(1)
            leaf = node - (2**level - 1)
            node = 2 * node + 1 + (signs < 0).to(node.dtype)
        return signs_RV, signs * (leaf + 1)
