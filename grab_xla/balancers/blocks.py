"""Balancing whole blocks of samples, whatever the steps in which they come."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, Balancer, State
from grab_xla.balancing.decisions import Decisions
from grab_xla.balancing.rows import Rows


class BlockBalancer(Balancer):
    """Balances blocks of ``block_size`` samples of the order; a subclass says how.

    The samples of a block that a step leaves unfinished wait for the next step, so that
    orders do not depend on where steps end. Those that still wait at the end of an
    epoch were not balanced and go to the middle.

    The state holds ``sums`` (num_sums, columns), the accumulators, and ``pending`` (k,
    columns), the gradients of the last k < block_size samples.
    """

    @property
    @abc.abstractmethod
    def block_size(self) -> int: ...

    @property
    @abc.abstractmethod
    def num_sums(self) -> int: ...

    @abc.abstractmethod
    def balance_blocks(self, sums: Tensor, rows_RD: Any, decide: Decisions) -> Tensor:
        """Returns the placements of whole blocks, and adds to ``sums`` in place."""

    def check_fits(self, num_samples: int) -> None:
        if 1 < num_samples < self.block_size:
            raise ValueError(
                f"{self} balances whole blocks of {self.block_size} samples (or "
                f"groups), and there are only {num_samples}, so that the order would "
                "never change: choose smaller blocks, or another balance_type"
            )

    def is_whole(self, state: State, num_rows: int) -> bool:
        """Returns whether a step begins and ends where blocks do."""
        return self.num_pending(state) == 0 and num_rows % self.block_size == 0

    @property
    def piece_size(self) -> int | None:
        return self.block_size

    @property
    def num_vectors(self) -> int:
        return self.num_sums + self.block_size - 1

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        sums = torch.zeros(self.num_sums, num_columns, dtype=dtype, device=device)
        return {"sums": sums, "pending": sums.new_zeros(0, num_columns)}

    def num_pending(self, state: State) -> int:
        return len(state["pending"])

    def begin_epoch(self, state: State) -> State:
        sums = torch.zeros_like(state["sums"])
        # No sample waits. Not a slice: its program would depend on how many waited.
        return {"sums": sums, "pending": sums.new_zeros(0, sums.shape[1])}

    def balance(self, state: State, rows_RD: Rows, decide: Decisions) -> Balanced:
        rows = rows_RD
        if decide.weights_R is not None:
            rows = rows * decide.weights_R.unsqueeze(1)
        if not isinstance(rows, Tensor):
            placements = self.balance_blocks(state["sums"], rows, decide)
            return state, placements.to(self.placement_dtype)
        if self.num_pending(state):
            rows = torch.cat([state["pending"], rows])
        end = len(rows) // self.block_size * self.block_size
        # A copy, because a view would keep the whole batch alive.
        state = {**state, "pending": rows[end:].clone()}
        if end == 0:
            none = torch.zeros(0, dtype=self.placement_dtype, device=rows.device)
            return state, none
        placements = self.balance_blocks(state["sums"], rows[:end], decide)
        return state, placements.to(self.placement_dtype)
