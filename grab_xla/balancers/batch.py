"""Batch balance: one accumulator decides all signs of a step, without a Gram matrix."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, State
from grab_xla.balancers.mean import MeanBalance
from grab_xla.balancing.decisions import SMALLEST, Decisions


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchBalance(MeanBalance):
    """Mean balance whose signs only see the accumulator at the beginning of the step.

    It is cheap, and worse the larger the step: herding grows with the samples in it.
    The order depends on how the epoch is cut into steps.

    Attributes:
        batch_size: Accepted for code that passes it; nothing reads it.
    """

    piece_size: ClassVar[int | None] = None

    batch_size: int | None = None

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        # The mean of what was balanced so far, as in grab-sampler; that it is one only
        # matters where signs are drawn.
        stale = state["sums"][:1].clone(), state["count"].clamp(min=SMALLEST)
        decide = dataclasses.replace(decide, stale=stale, row_by_row=False)
        return super().balance(state, rows_RD, decide)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UncentredBatchBalance(BatchBalance):
    """Batch balance as in grab-sampler 0.1.3, whose accumulator sums raw gradients.

    It serves comparisons: unless the mean gradient is nearly zero, its orders are
    several times worse than random ones.
    """

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        state, placements = super().balance(state, rows_RD, decide)
        sums, signs = state["sums"], placements.to(state["sums"].dtype)
        if decide.weights_R is not None:
            signs = signs * decide.weights_R
        raw = signs.sum() * state["mean"]
        return {**state, "sums": torch.cat([sums[:1] + raw, sums[1:]])}, placements
