"""Blocks of samples, and pairs, whose differences need no estimate of the mean.

PairBalance and CD-GraB by Cooper et al., arXiv:2302.00845.
"""

from __future__ import annotations

import abc
import dataclasses

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, Balancer, State
from grab_xla.balancing.decisions import Decisions
from grab_xla.balancing.reordering import reorder_interleaved
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
            none = torch.zeros(0, dtype=self.placement_dtype, device=rows.device)
            return state, none
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
