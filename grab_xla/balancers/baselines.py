"""The baselines: orders that need no gradients, and those by their norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, Ordering, State
from grab_xla.balancing.decisions import Decisions, squared_norms
from grab_xla.balancing.reordering import check_permutation, reorder_by_score


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomReshuffling(Ordering):
    """A new random permutation every epoch."""

    is_drawn_anew: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffleOnce(Ordering):
    """The first epoch's order in every epoch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithReplacement(Ordering):
    """Every sample drawn from all samples, in every epoch: not a permutation."""

    is_drawn_anew: ClassVar[bool] = True
    is_permutation: ClassVar[bool] = False

    def first_order(
        self, num_samples: int, shuffled: bool, generator: torch.Generator
    ) -> np.ndarray:
        return torch.randint(num_samples, (num_samples,), generator=generator).numpy()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedOrder(Ordering):
    """A given order in every epoch.

    Attributes:
        orders: A permutation of ``range(num_samples)``.
    """

    # Not part of what a saved state is compared by: the order itself is saved.
    orders: Sequence[int] | Any = dataclasses.field(repr=False)

    def first_order(
        self, num_samples: int, shuffled: bool, generator: torch.Generator
    ) -> np.ndarray:
        return check_permutation("orders", self.orders, num_samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormOrder(Ordering):
    """Samples sorted by the norm that their gradient had in this epoch.

    Attributes:
        descending_norm: Whether the largest comes first.
    """

    needs_gradients: ClassVar[bool] = True
    piece_size: ClassVar[int | None] = 1
    placement_dtype: ClassVar[torch.dtype] = torch.float32

    descending_norm: bool = True

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        return state, decide.whole(squared_norms(rows_RD))

    def next_order(self, order: np.ndarray, placements: np.ndarray) -> np.ndarray:
        return reorder_by_score(order, placements, self.descending_norm)
