"""Mean balance and its variants: vectors one after the other, centred by an estimate.

GraB of Lu, Guo and De Sa (arXiv:2205.10733) and its variants, which differ in what is
centred and in the estimate of the mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, Balancer, State
from grab_xla.balancing.decisions import (
    SMALLEST,
    Decisions,
    mark_nonfinite,
    squared_norms,
    without_nan,
)
from xla_replica import where_finite
from xla_replica.common.arguments import check_number, checked


class Centred(Balancer):
    """Balances ``weight (row - centre) / scale``; a subclass says what these are.

    The state holds ``sums`` (accumulators + 1, columns), the signed sums and, last, the
    plain sum of what was balanced in this epoch; ``count`` (1,), the sum of the weights
    of its terms; ``mean`` (1, columns), the estimate; and what the subclass adds.
    """

    piece_size: ClassVar[int | None] = 1

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        mean = torch.zeros(1, num_columns, dtype=dtype, device=device)
        sums = mean.new_zeros(self.num_nodes + 1, num_columns)
        return {"sums": sums, "mean": mean, "count": mean.new_zeros(1)}

    def begin_epoch(self, state: State) -> State:
        for name in ("sums", "count"):
            state[name].zero_()
        return state

    def centred(self, state: State, rows_RD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns rows and a centre, ``(1, columns)``; the difference is balanced.

        The centre is None if rows have been centred.
        """
        return rows_RD, state["mean"]

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        count, parts = state["count"], []
        others = decide.thresholds_RN, decide.weights_R
        for tile, thresholds, weights in decide.tiles(rows_RD, *others):
            rows, centre = self.centred(state, tile)
            if weights is not None:
                rows = rows if centre is None else rows - centre
                rows, centre = rows * weights.unsqueeze(1), None
            placements = decide.balance(
                state["sums"], rows, centre, thresholds, self.depth
            )
            seen = (placements != 0).to(count.dtype)
            count = count + (seen if weights is None else seen * weights).sum()
            parts.append(placements.to(self.placement_dtype))
        placements = parts[0] if len(parts) == 1 else torch.cat(parts)
        return {**state, "count": count}, placements


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanBalance(Centred):
    """GraB: centred by the mean of the previous epoch, by zero in the first one."""

    def begin_epoch(self, state: State) -> State:
        # The mean of the deviations is the error of the estimate.
        off_by = state["sums"][-1:] / state["count"].clamp(min=SMALLEST)
        return super().begin_epoch({**state, "mean": state["mean"] + off_by})


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
class SignBalance(MeanBalance):
    """Mean balance of the signs of the gradients' entries."""

    def centred(self, state: State, rows_RD: Tensor) -> tuple[Tensor, Tensor]:
        return mark_nonfinite(torch.sign(rows_RD), rows_RD), state["mean"]


class Scaled(Centred):
    """Balances what is centred and divided by the ``scale`` of the state."""

    fills: ClassVar[Mapping[str, float]] = {"scale": 1.0}

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        state = super().init(num_columns, dtype, device)
        return {**state, "scale": torch.ones_like(state["mean"])}

    def centred(self, state: State, rows_RD: Tensor) -> tuple[Tensor, None]:
        return (rows_RD - state["mean"]).div_(state["scale"]), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaMeanBalance(Scaled, MeanBalance):
    """Mean balance of gradients divided by the root of their second moment.

    That is what ``sampler.sorter.update_v`` received, such as Adam's; one if it was not
    called.

    Attributes:
        eps: Added to the root.
    """

    state_methods = ("update_v",)

    eps: float = checked(1e-8, above=0)

    def begin_epoch(self, state: State) -> State:
        # Deviations were divided by the scale; the mean is in the gradients' unit.
        return super().begin_epoch(_with_sum_times(state["scale"], state))

    def update_v(self, state: State, second_moment: Tensor) -> State:
        """Returns the state with this epoch's deviations in the new unit.

        Where a second moment is negative or not finite, the scale does not change.
        """
        scale = second_moment.sqrt() + self.eps
        scale = torch.where(where_finite(scale), scale, state["scale"])
        return {**_with_sum_times(state["scale"] / scale, state), "scale": scale}


def _with_sum_times(factors: Tensor, state: State) -> State:
    """Returns the state with its plain sum multiplied by ``factors``."""
    sums = state["sums"]
    return {**state, "sums": torch.cat([sums[:-1], sums[-1:] * factors])}


class MovingAverages(Centred):
    """Centred by a moving average of the means of the steps.

    The average includes the current step, as in grab-sampler; so the result depends
    on how the epoch is cut into steps. It continues from epoch to epoch.

    The state adds ``averages``, (k, columns), one for each of the `decays`, of the
    first to the k-th power of the means; and ``missing``, (k,), one minus the sum of
    their weights, which undoes the bias of their beginning at zero.
    """

    piece_size: ClassVar[int | None] = None

    @property
    def decays(self) -> Sequence[float]:
        raise NotImplementedError

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        state = super().init(num_columns, dtype, device)
        averages = state["mean"].new_zeros(len(self.decays), num_columns)
        return {
            **state,
            "averages": averages,
            "missing": averages.new_ones(len(averages)),
        }

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        averages, missing, estimates = zip(*self._moved(state, rows_RD, decide))
        state = {
            **state,
            "averages": torch.cat(averages),
            "missing": torch.cat(missing),
        }
        return super().balance(self.estimated(state, *estimates), rows_RD, decide)

    def estimated(self, state: State, mean: Tensor, *powers: Tensor) -> State:
        """Returns the state for a step, given estimates of the mean and of powers."""
        return {**state, "mean": mean}

    def _moved(
        self, state: State, rows_RD: Tensor, decide: Decisions
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields an average with these rows' mean, what it misses, and its estimate.

        The mean is that of finite rows; without one nothing moves.
        """
        rows = without_nan(rows_RD)
        finite = where_finite(decide.whole(squared_norms(rows)))
        weights = finite.to(rows.dtype).unsqueeze(0)
        count = weights.sum(1)
        mean, any_finite = weights @ rows / count.clamp(min=1), count > 0
        old = zip(self.decays, state["averages"].split(1), state["missing"].split(1))
        for power, (beta, average, missing) in enumerate(old, start=1):
            moved = beta * average + (1 - beta) * mean**power
            average = torch.where(any_finite, moved, average)
            missing = torch.where(any_finite, beta * missing, missing)
            # Before the first value the estimate is zero, not zero divided by zero.
            known = torch.where(missing < 1, 1 - missing, torch.ones_like(missing))
            yield average, missing, average / known


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMABalance(MovingAverages):
    """Centred by an exponential moving average of the means of the steps.

    Attributes:
        ema_decay: The weight of the newest step, one minus beta.
    """

    ema_decay: float = checked(0.1, above=0, below=1)

    @property
    def decays(self) -> Sequence[float]:
        return [1 - self.ema_decay]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaEMABalance(Scaled, MovingAverages):
    """Centred and scaled by Adam's two averages of the means of the steps.

    Attributes:
        betas: The decay of the average of the means and of that of their squares.
        eps: Added to the root of the second average.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = checked(1e-8, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            check_number("betas", beta, above=0, below=1)

    @property
    def decays(self) -> Sequence[float]:
        return self.betas

    def estimated(self, state: State, mean: Tensor, *powers: Tensor) -> State:
        return {**state, "mean": mean, "scale": powers[0].sqrt() + self.eps}
