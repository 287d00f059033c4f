"""Mean balance around moving averages of the means of the steps, and scaled by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from grab_xla.balancers.base import Balanced, State
from grab_xla.balancers.mean import MeanBalance, ScaledBalance
from grab_xla.balancing.decisions import Decisions, squared_norms, without_nan
from xla_replica import where_finite
from xla_replica.common.arguments import check_number, checked


class MovingAverages(MeanBalance):
    """Centred by a moving average of the means of the steps.

    The average includes the current step, as in grab-sampler; so the result depends
    on how the epoch is cut into steps. It continues from epoch to epoch.

    The state adds ``averages``, (k, columns), one for each of the `betas`, of the
    first to the k-th power of the means; and ``missing``, (k,), one minus the sum of
    their weights, which undoes the bias of their beginning at zero.
    """

    piece_size: ClassVar[int | None] = None

    betas: Sequence[float]

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        state = super().init(num_columns, dtype, device)
        averages = state["mean"].new_zeros(len(self.betas), num_columns)
        missing = averages.new_ones(len(averages))
        return {**state, "averages": averages, "missing": missing}

    def begin_epoch(self, state: State) -> State:
        return {**super().begin_epoch(state), "mean": state["mean"]}

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        state, placements = self.moved(state, rows_RD, decide), []
        # Centred rows may be a copy.
        for rows, own in decide.parts(rows_RD, decide.at_once or len(rows_RD) or 1):
            state, placed = super().balance(state, rows, own)
            placements.append(placed)
        return state, torch.cat(placements)

    def moved(self, state: State, rows_RD: Tensor, decide: Decisions) -> State:
        """Returns the state after the averages have moved to the mean of a step."""
        rows = without_nan(rows_RD)
        finite = where_finite(decide.whole(squared_norms(rows)))
        weights = finite.to(rows.dtype).unsqueeze(0)
        count = weights.sum(1)
        mean = weights @ rows / count.clamp(min=1)
        averages, missing = [], []
        old = zip(self.betas, state["averages"].split(1), state["missing"].split(1))
        for power, (beta, average, lacks) in enumerate(old, start=1):
            new = beta * average + (1 - beta) * mean**power
            # Without a finite row nothing moves.
            averages.append(torch.where(count > 0, new, average))
            missing.append(torch.where(count > 0, beta * lacks, lacks))
        moved = {"averages": torch.cat(averages), "missing": torch.cat(missing)}
        # Before the first value the estimate is zero, not zero divided by zero.
        known = [torch.where(m < 1, 1 - m, torch.ones_like(m)) for m in missing]
        estimates = [average / each for average, each in zip(averages, known)]
        return self.estimated({**state, **moved}, *estimates)

    def estimated(self, state: State, mean: Tensor, *powers: Tensor) -> State:
        """Returns the state for a step, given estimates of the mean and of powers."""
        return {**state, "mean": mean}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMABalance(MovingAverages):
    """Centred by an exponential moving average of the means of the steps.

    Attributes:
        ema_decay: The weight of the newest step, one minus beta.
    """

    ema_decay: float = checked(0.1, above=0, below=1)

    @property
    def betas(self) -> Sequence[float]:  # type: ignore[override]
        return [1 - self.ema_decay]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaEMABalance(ScaledBalance, MovingAverages):
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

    def estimated(self, state: State, mean: Tensor, *powers: Tensor) -> State:
        return {**state, "mean": mean, "scale": powers[0].sqrt() + self.eps}
