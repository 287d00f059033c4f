"""Mean balance and its variants: vectors one after the other, centred by an estimate.

GraB of Lu, Guo and De Sa (arXiv:2205.10733) and its variants, which differ in what is
centred, in its scale, and in the accumulators.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, Balancer, State
from grab_xla.balancing.decisions import Decisions, squared_norms, without_nan
from xla_replica import where_finite
from xla_replica.common.arguments import checked


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanBalance(Balancer):
    """GraB: centred by the mean of the previous epoch, by zero in the first one.

    The state holds ``sums`` (accumulators + 1, columns), the signed sums and, last, the
    plain sum of what was balanced in this epoch; ``count`` (1,), the number of its
    terms; and ``mean`` (1, columns), the estimate.
    """

    piece_size: ClassVar[int | None] = 1

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        mean = torch.zeros(1, num_columns, dtype=dtype, device=device)
        sums = mean.new_zeros(self.num_nodes + 1, num_columns)
        return {"sums": sums, "mean": mean, "count": mean.new_zeros(1)}

    def begin_epoch(self, state: State) -> State:
        sums, count = state["sums"], state["count"]
        # The mean of the deviations is the error of the estimate.
        mean = state["mean"] + sums[-1:] / count.clamp(min=1)
        return {**state, "sums": sums.zero_(), "count": count.zero_(), "mean": mean}

    def centred(self, state: State, rows_RD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns rows and a centre, ``(1, columns)``; the difference is balanced.

        The centre is None if rows have been centred.
        """
        return rows_RD, state["mean"]

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        rows, centre = self.centred(state, rows_RD)
        placements = decide.balance(state["sums"], rows, centre, self.depth)
        count = state["count"] + (placements != 0).to(rows.dtype).sum()
        return {**state, "count": count}, placements.to(self.placement_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecursiveBalance(MeanBalance):
    """Sends samples from the root of a binary tree to a leaf by their signs at nodes.

    Every node has an accumulator; +1 leads to the left. The next order is that of the
    leaves, each with its positives as they came and its negatives reversed. Depth 0 is
    mean balance.

    The state is that of mean balance with 2^(depth + 1) - 1 accumulators.

    Attributes:
        depth: The number of levels below the root.
    """

    placement_dtype: ClassVar[torch.dtype] = torch.int32

    depth: int = checked(5, least=0)  # type: ignore[misc]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignBalance(MeanBalance):
    """Mean balance of the signs of the gradients' entries."""

    def centred(self, state: State, rows_RD: Tensor) -> tuple[Tensor, Tensor]:
        is_bad = where_finite(rows_RD).logical_not_()
        return torch.sign(rows_RD).masked_fill_(is_bad, torch.nan), state["mean"]


class ScaledBalance(MeanBalance):
    """Mean balance of rows that are centred and divided by the state's ``scale``.

    The state adds ``scale`` (1, columns), which begins at one.
    """

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        state = super().init(num_columns, dtype, device)
        return {**state, "scale": torch.ones_like(state["mean"])}

    def centred(self, state: State, rows_RD: Tensor) -> tuple[Tensor, None]:
        # In columns that fill up a replica's share all is zero.
        return (rows_RD - state["mean"]).div_(state["scale"].clamp(min=1e-30)), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaMeanBalance(ScaledBalance):
    """Mean balance of gradients divided by the root of their second moment.

    That is what ``sampler.sorter.update_v`` received, such as Adam's; one if it was not
    called. The state's ``scale`` is its root.

    Attributes:
        eps: Added to the root.
    """

    state_methods = ("update_v",)

    eps: float = checked(1e-8, above=0)

    def begin_epoch(self, state: State) -> State:
        # Deviations were divided by the scale; the mean is in the gradients' unit.
        state["sums"][-1:] *= state["scale"]
        return super().begin_epoch(state)

    def update_v(self, state: State, second_moment: Tensor) -> State:
        """Returns the state with this epoch's deviations in the new unit.

        Where a second moment is negative or not finite, the scale does not change.
        """
        scale = second_moment.sqrt() + self.eps
        scale = torch.where(where_finite(scale), scale, state["scale"])
        state["sums"][-1:] *= state["scale"] / scale
        return {**state, "scale": scale}
