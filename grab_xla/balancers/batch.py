"""Batch balance: one accumulator decides all signs of a step, without a Gram matrix."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, State
from grab_xla.balancers.mean import MeanBalance
from grab_xla.balancing.decisions import Decisions, without_nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchBalance(MeanBalance):
    """Mean balance whose signs only see the accumulator at the beginning of the step.

    It is cheap, and worse the larger the step: herding grows with the samples in it.
    The order depends on how the epoch is cut into steps.

    Attributes:
        batch_size: Accepted for code that passes it; nothing reads it.
    """

    # Whether the accumulator sums centred gradients or raw ones.
    centres_update: ClassVar[bool] = True

    batch_size: int | None = None

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        rows, centre = self.centred(state, without_nan(rows_RD))
        vectors = rows - centre
        squares = (vectors * vectors).sum(1)
        products = decide.whole(torch.stack([vectors @ state["sums"][0], squares]))
        finite = torch.isfinite(products[1])
        # The mean of what was balanced so far, as in grab-sampler; it only matters
        # where signs are drawn.
        inner = products[0] / state["count"].clamp(min=1)
        thresholds = decide.thresholds_RN
        below = decide.below(inner, None if thresholds is None else thresholds[:, 0])
        seen = finite.to(vectors.dtype)
        signs = torch.where(below, seen, -seen)
        sums = torch.addmm(state["sums"], torch.stack([signs, seen]), vectors)
        if not self.centres_update:
            raw = signs.sum() * state["mean"]
            sums = torch.cat([sums[:1] + raw, sums[1:]])
        new_state = {**state, "sums": sums, "count": state["count"] + seen.sum()}
        return new_state, signs.to(self.placement_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UncentredBatchBalance(BatchBalance):
    """Batch balance as in grab-sampler 0.1.3, whose accumulator sums raw gradients.

    It serves comparisons: unless the mean gradient is nearly zero, its orders are
    several times worse than random ones.
    """

    centres_update: ClassVar[bool] = False
