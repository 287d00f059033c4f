"""Batch balance: one accumulator decides all signs of a step, without a Gram matrix."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, State
from grab_xla.balancers.mean import MeanBalance
from grab_xla.balancing.decisions import Decisions, squared_norms, without_nan
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

    batch_size: int | None = None

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        sums, count, mean = state["sums"], state["count"], state["mean"]
        rows, limits = without_nan(rows_RD), decide.thresholds_RN
        # Differences are not formed.
        products = (rows @ sums[:1].T - mean @ sums[:1].T)[:, 0]
        products, squares = decide.whole(torch.stack([products, squared_norms(rows)]))
        # The mean of what was balanced so far, as in grab-sampler; that it is one only
        # matters where signs are drawn.
        products = products / count.clamp(min=1)
        finite = where_finite(squares)
        below = decide.below(products, None if limits is None else limits[:, 0])
        seen = finite.to(sums.dtype)
        placements = torch.where(below, seen, -seen)
        factors_2R = torch.stack([placements, seen])
        sums.addmm_(factors_2R, rows)
        sums.addcmul_(factors_2R.sum(1, keepdim=True), mean, value=-1)
        state = {**state, "count": count + seen.sum()}
        return state, placements.to(self.placement_dtype)
