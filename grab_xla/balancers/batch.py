"""Batch balance: one accumulator decides all signs of a step, without a Gram matrix."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, State
from grab_xla.balancers.mean import MeanBalance
from grab_xla.balancing.decisions import (
    SMALLEST,
    Decisions,
    squared_norms,
    without_nan,
)
from xla_replica import where_finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchBalance(MeanBalance):
    """Mean balance whose signs only see the accumulator at the beginning of the step.

    It is cheap, and worse the larger the step: herding grows with the samples in it.
    The order depends on how the epoch is cut into steps.

    Attributes:
        batch_size: Accepted for code that passes it; nothing reads it.
    """

    piece_size: ClassVar[int | None] = None
    # Whether the accumulator sums centred gradients or raw ones.
    centres_update: ClassVar[bool] = True

    batch_size: int | None = None

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        sums, weights_R = state["sums"], decide.weights_R
        # Vectors are formed twice, a tile at a time, rather than kept.
        parts = []
        for tile, weights in decide.tiles(rows_RD, weights_R):
            vectors = self._vectors(state, tile, weights)
            inner = (vectors @ sums[:1].T)[:, 0]
            parts.append(torch.stack([inner, squared_norms(vectors)]))
        products, squares = decide.whole(torch.cat(parts, dim=1))
        seen = where_finite(squares).to(sums.dtype)
        # The mean of what was balanced so far, as in grab-sampler; it only matters
        # where signs are drawn.
        inner = products / state["count"].clamp(min=SMALLEST)
        thresholds = decide.thresholds_RN
        below = decide.below(inner, None if thresholds is None else thresholds[:, 0])
        signs = torch.where(below, seen, -seen)
        factors_R2 = torch.stack([signs, seen], dim=1)
        for tile, weights, factors in decide.tiles(rows_RD, weights_R, factors_R2):
            sums.addmm_(factors.T, self._vectors(state, tile, weights))
        placements = signs.to(self.placement_dtype)
        if weights_R is not None:
            signs, seen = signs * weights_R, seen * weights_R
        if not self.centres_update:
            raw = signs.sum() * state["mean"]
            sums = torch.cat([sums[:1] + raw, sums[1:]])
        count = state["count"] + seen.sum()
        return {**state, "sums": sums, "count": count}, placements

    def _vectors(
        self, state: State, rows_RD: Tensor, weights_R: Tensor | None
    ) -> Tensor:
        rows, centre = self.centred(state, without_nan(rows_RD))
        vectors: Tensor = rows - centre
        return vectors if weights_R is None else vectors * weights_R.unsqueeze(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UncentredBatchBalance(BatchBalance):
    """Batch balance as in grab-sampler 0.1.3, whose accumulator sums raw gradients.

    It serves comparisons: unless the mean gradient is nearly zero, its orders are
    several times worse than random ones.
    """

    centres_update: ClassVar[bool] = False
