"""Blocks of samples, and pairs, whose differences need no estimate of the mean.

PairBalance and CD-GraB by Cooper et al., arXiv:2302.00845.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, Balancer, State
from grab_xla.balancing.decisions import Decisions, squared_norms, without_nan
from grab_xla.balancing.reordering import reorder_interleaved
from xla_replica import computed_once, where_finite
from xla_replica.common.arguments import checked


class BlockBalancer(Balancer, abc.ABC):
    """Balances blocks of ``piece_size`` samples of the order; a subclass says how.

    The samples of a block that a step leaves unfinished wait for the next step, so that
    orders do not depend on where steps end. Those that still wait at the end of an
    epoch were not balanced and go to the middle.

    The state holds ``sums`` (num_nodes, columns), the accumulators, and ``pending`` (k,
    columns), the gradients of the last k < piece_size samples.
    """

    @abc.abstractmethod
    def place_blocks(self, sums: Tensor, rows_RD: Tensor, decide: Decisions) -> Tensor:
        """Returns the placements of whole blocks, and adds to ``sums`` in place."""

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        sums = torch.zeros(self.num_nodes, num_columns, dtype=dtype, device=device)
        return {"sums": sums, "pending": sums.new_zeros(0, num_columns)}

    def begin_epoch(self, state: State) -> State:
        sums = torch.zeros_like(state["sums"])
        # No sample waits. Not a slice: its program would depend on how many waited.
        return {"sums": sums, "pending": sums.new_zeros(0, sums.shape[1])}

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        rows = rows_RD
        if self.num_pending(state):
            rows = torch.cat([state["pending"], rows])
        end = len(rows) // self.piece_size * self.piece_size
        # A copy, because a view would keep the whole batch alive.
        state = {**state, "pending": rows[end:].clone()}
        if end == 0:
            return state, torch.zeros(0, dtype=self.placement_dtype, device=rows.device)
        placements = self.place_blocks(state["sums"], rows[:end], decide)
        return state, placements.to(self.placement_dtype)


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

    num_workers: int = checked(1, least=1)

    @property
    def piece_size(self) -> int:  # type: ignore[override]
        return 2 * self.num_workers

    def place_blocks(self, sums: Tensor, rows_RD: Tensor, decide: Decisions) -> Tensor:
        first, second = _partners(rows_RD, self.num_workers)
        if decide.thresholds_RN is not None:
            # That of the partner, which came last.
            limits = decide.thresholds_RN[: len(rows_RD)]
            limits = _partners(limits, self.num_workers)[1]
            decide = dataclasses.replace(decide, thresholds_RN=limits)
        rows, centre = (first, second) if decide.row_by_row else (first - second, None)
        signs = decide.balance(sums, rows, centre)
        by_worker = signs.view(-1, 1, self.num_workers)
        return torch.cat([by_worker, -by_worker], dim=1).flatten()

    def next_order(self, order: np.ndarray, placements: np.ndarray) -> np.ndarray:
        return reorder_interleaved(order, placements, self.num_workers)


def _partners(rows_RN: Tensor, num_workers: int) -> tuple[Tensor, Tensor]:
    """Returns the first and second samples of the pairs, ``(R / 2, N)`` each."""
    if num_workers == 1:
        return rows_RN[0::2], rows_RN[1::2]
    blocks = rows_RN.unflatten(0, (-1, 2, num_workers))
    return blocks[:, 0].flatten(0, 1), blocks[:, 1].flatten(0, 1)


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
