"""Orders by the norm of the gradient."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import torch

from grab_xla.balancers.base import Balanced, Ordering, State
from grab_xla.balancing.decisions import Decisions, squared_norms
from grab_xla.balancing.reordering import reorder_by_score
from grab_xla.balancing.rows import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormOrder(Ordering):
    """Samples sorted by the norm that their gradient had in this epoch.

    Attributes:
        descending_norm: Whether the largest comes first.
    """

    needs_gradients: ClassVar[bool] = True
    needs_gram: ClassVar[bool] = False
    piece_size: ClassVar[int | None] = 1
    placement_dtype: ClassVar[torch.dtype] = torch.float32

    descending_norm: bool = True

    def takes_factored(self, state: State, num_rows: int) -> bool:
        return type(self).balance is NormOrder.balance

    def balance(self, state: State, rows_RD: Rows, decide: Decisions) -> Balanced:
        return state, decide.whole(squared_norms(rows_RD))

    def next_order(
        self, order: np.ndarray, placements: np.ndarray, generator: torch.Generator
    ) -> np.ndarray:
        return reorder_by_score(order, placements, self.descending_norm)
