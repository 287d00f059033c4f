"""Pair balance: differences of neighbours need no estimate of the mean.

PairBalance and CD-GraB by Cooper et al., arXiv:2302.00845.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancers.blocks import BlockBalancer
from grab_xla.balancing.compiled_loop import balance_in_sequence
from grab_xla.balancing.decisions import Decisions, finite_rows, mark_nonfinite
from grab_xla.balancing.reordering import reorder_interleaved
from xla_replica.common.arguments import check_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairBalance(BlockBalancer):
    """Balances differences of pairs; one goes to the front, its partner to the back.

    With W workers, worker w always owns the samples at positions w, w + W, w + 2W ...
    of the order, and its pairs are formed among its own samples: coordinated pair
    balance. All workers share one accumulator; pair t of worker 0 comes before that of
    worker 1. A block is a pair of every worker.

    Attributes:
        num_workers: The number of shards that are ordered separately. It is part of
            the order: choose it once for a training, whatever the number of replicas.
    """

    num_workers: int = 1

    def __post_init__(self) -> None:
        check_integer("num_workers", self.num_workers, 1)

    @property
    def block_size(self) -> int:
        return 2 * self.num_workers

    @property
    def num_sums(self) -> int:
        return 1

    def balance_blocks(
        self, sums: Tensor, rows_RD: Tensor, decide: Decisions
    ) -> Tensor:
        first, second = self._partners(rows_RD)
        thresholds = decide.thresholds_RN
        if thresholds is not None:
            # That of the partner, which came last.
            thresholds = self._partners(thresholds[: len(rows_RD)])[1]
        signs = self._signs(sums, first, second, thresholds, decide)
        signs = signs.unflatten(0, (-1, 1, self.num_workers))
        return torch.cat([signs, -signs], dim=1).flatten()

    def _partners(self, rows_RN: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first and second samples of the pairs, ``(R / 2, N)`` each."""
        if self.num_workers == 1:
            return rows_RN[0::2], rows_RN[1::2]
        blocks = rows_RN.unflatten(0, (-1, 2, self.num_workers))
        return blocks[:, 0].flatten(0, 1), blocks[:, 1].flatten(0, 1)

    def _signs(
        self,
        sums: Tensor,
        first_PD: Tensor,
        second_PD: Tensor,
        thresholds_PN: Tensor | None,
        decide: Decisions,
    ) -> Tensor:
        """Returns the signs of the pairs, ``(P,)``, and adds the pairs to ``sums``."""
        if decide.loops:
            return balance_in_sequence(
                first_PD, second_PD, sums, thresholds_PN, tie=decide.tie
            )
        parts = []
        differences = mark_nonfinite(first_PD - second_PD, first_PD, second_PD)
        for vectors, limits in decide.tiles(differences, thresholds_PN):
            gram, products = decide.gram(vectors, sums)
            finite = finite_rows(gram)
            limits = None if limits is None else limits[:, 0]
            signs = decide.signs(products[:, 0], gram, finite, limits)
            sums.addmm_(signs.unsqueeze(0), vectors)
            parts.append(signs)
        return torch.cat(parts)

    def next_order(
        self, order: np.ndarray, placements: np.ndarray, generator: torch.Generator
    ) -> np.ndarray:
        return reorder_interleaved(order, placements, self.num_workers)
