"""Mean balance and its relatives: one vector after the other, centred by an estimate.

GraB of Lu, Guo and De Sa (arXiv:2205.10733) and its variants: what differs is what is
centred, and by which estimate of the mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch

from grab_xla.balancers.base import Balancer, State
from grab_xla.balancing.checks import check_positive, check_probability
from grab_xla.balancing.compiled_loop import balance_in_sequence
from grab_xla.balancing.decisions import Decisions, finite_rows, spoil, without_nan


class Centred(Balancer):
    """Balances ``(row - centre) / scale``; what these are is the subclass's.

    State: ``sums`` (accumulators + 1, columns), signed sums and, last, the plain sum
    of what was balanced in this epoch; ``count`` (1,), of how many; ``mean`` (1,
    columns), the estimate; besides, what the subclass keeps.
    """

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        like = {"dtype": dtype, "device": device}
        return {
            "sums": torch.zeros(2 ** (self.depth + 1), num_columns, **like),
            "mean": torch.zeros(1, num_columns, **like),
            "count": torch.zeros(1, **like),
        }

    depth: ClassVar[int] = 0

    def centred(
        self, state: State, rows_RD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(R, columns)``, ``(1, columns)``: their difference is what is balanced."""
        return rows_RD, state["mean"]

    def balance(
        self, state: State, rows_RD: torch.Tensor, decide: Decisions
    ) -> tuple[State, torch.Tensor]:
        rows, centre = self.centred(state, rows_RD)
        if decide.loops:
            sums, codes = balance_in_sequence(
                rows,
                centre,
                state["sums"],
                decide.thresholds_RN,
                depth=self.depth,
                tie_positive=decide.tie == "positive",
            )
            count = state["count"] + torch.count_nonzero(codes)
            return {**state, "sums": sums, "count": count}, codes.to(self.code_dtype)
        rows = without_nan(rows)
        sums, count, parts = state["sums"], state["count"], []
        for tile, thresholds in decide.tiles(rows, decide.thresholds_RN):
            gram, products = decide.centred_gram(tile, centre, sums[:-1])
            finite = finite_rows(gram)
            signs, codes = self.walk(gram, products, finite, thresholds, decide)
            seen = finite.to(sums.dtype)
            weights = torch.cat([signs, seen.unsqueeze(1)], dim=1).T
            off_centre = weights.sum(1, keepdim=True) * centre
            sums = torch.addmm(sums, weights, tile) - off_centre
            count = count + seen.sum()
            parts.append(codes.to(self.code_dtype))
        return {**state, "sums": sums, "count": count}, torch.cat(parts)

    def walk(
        self,
        gram_RR: torch.Tensor,
        products_RV: torch.Tensor,
        finite_R: torch.Tensor,
        thresholds_RN: torch.Tensor | None,
        decide: Decisions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(R, V)`` signs at the accumulators, and ``(R,)`` codes."""
        limits = None if thresholds_RN is None else thresholds_RN[:, 0]
        signs = decide.signs(products_RV[:, 0], gram_RR, finite_R, limits)
        return signs.unsqueeze(1), signs


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanBalance(Centred):
    """GraB: centred by the mean of the epoch before, by zero in the first one."""

    def begin_epoch(self, state: State) -> State:
        # The deviations' mean is what the estimate was off by.
        off_by = state["sums"][-1:] / state["count"].clamp(min=1)
        return {
            **state,
            "mean": state["mean"] + off_by,
            "sums": torch.zeros_like(state["sums"]),
            "count": torch.zeros_like(state["count"]),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignBalance(MeanBalance):
    """Mean balance of the signs of the gradients' entries."""

    def centred(
        self, state: State, rows_RD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return spoil(torch.sign(rows_RD), rows_RD), state["mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaMeanBalance(MeanBalance):
    """Mean balance of gradients divided by the root of their second moment.

    The second moment is what `GraBSampler.update_v` was given, such as Adam's; without
    it this is mean balance.

    Attributes:
        eps: Added to the root.
    """

    fills: ClassVar[Mapping[str, float]] = {"scale": 1.0}

    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_positive("eps", self.eps)

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        state = super().init(num_columns, dtype, device)
        return {**state, "scale": torch.ones_like(state["mean"])}

    def centred(
        self, state: State, rows_RD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return scaled(state, rows_RD)

    def begin_epoch(self, state: State) -> State:
        # Deviations were divided by the scale; the mean is kept in the gradients' unit.
        off_by = state["sums"][-1:] * state["scale"]
        sums = torch.cat([state["sums"][:-1], off_by])
        return super().begin_epoch({**state, "sums": sums})

    def with_second_moment(self, state: State, second_moment: torch.Tensor) -> State:
        """The state from now on, given ``(columns,)`` second moments.

        The epoch's deviations so far are brought to the new unit. Where one is
        negative or not finite, the scale stays.
        """
        scale = second_moment.reshape(1, -1).sqrt() + self.eps
        scale = torch.where(torch.isfinite(scale), scale, state["scale"])
        rescaled = state["sums"][-1:] * (state["scale"] / scale)
        sums = torch.cat([state["sums"][:-1], rescaled])
        return {**state, "sums": sums, "scale": scale}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMABalance(Centred):
    """Centred by an exponential moving average of the means of the batches.

    The batch at hand is in the average already, as in grab-sampler; so the result
    depends on how the epoch is cut into batches. The average runs on over epochs.

    Attributes:
        ema_decay: Weight of the newest batch, one minus beta.
    """

    ema_decay: float = 0.1

    def __post_init__(self) -> None:
        check_probability("ema_decay", self.ema_decay)

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        state = super().init(num_columns, dtype, device)
        # What is left of the weights' sum: one minus it undoes the bias towards zero.
        missing = torch.ones(1, dtype=dtype, device=device)
        return {**state, "average": torch.zeros_like(state["mean"]), "missing": missing}

    def begin_epoch(self, state: State) -> State:
        zeroed = {name: torch.zeros_like(state[name]) for name in ("sums", "count")}
        return {**state, **zeroed}

    def balance(
        self, state: State, rows_RD: torch.Tensor, decide: Decisions
    ) -> tuple[State, torch.Tensor]:
        return super().balance(self.with_batch(state, rows_RD, decide), rows_RD, decide)

    def with_batch(
        self, state: State, rows_RD: torch.Tensor, decide: Decisions
    ) -> State:
        """The state with a batch in its averages; one without a finite row is not."""
        mean, any_finite = batch_mean(rows_RD, decide)
        beta = 1 - self.ema_decay
        average = beta * state["average"] + (1 - beta) * mean
        average = torch.where(any_finite, average, state["average"])
        missing = torch.where(any_finite, beta * state["missing"], state["missing"])
        centre = average / unbiased(missing)
        return {**state, "average": average, "missing": missing, "mean": centre}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaEMABalance(Centred):
    """Centred and scaled by Adam's two averages of the means of the batches.

    Attributes:
        betas: Decay of the average of the means and of that of their squares.
        eps: Added to the root of the second.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            check_probability("betas", beta)
        check_positive("eps", self.eps)

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        state = super().init(num_columns, dtype, device)
        like = {"dtype": dtype, "device": device}
        return {
            **state,
            "averages": torch.zeros(2, num_columns, **like),
            "missing": torch.ones(2, **like),
            "scale": torch.ones(1, num_columns, **like),
        }

    def begin_epoch(self, state: State) -> State:
        zeroed = {name: torch.zeros_like(state[name]) for name in ("sums", "count")}
        return {**state, **zeroed}

    def centred(
        self, state: State, rows_RD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return scaled(state, rows_RD)

    def balance(
        self, state: State, rows_RD: torch.Tensor, decide: Decisions
    ) -> tuple[State, torch.Tensor]:
        mean, any_finite = batch_mean(rows_RD, decide)
        averages, missing = [], []
        for moment, beta in enumerate(self.betas):
            old = state["averages"][moment : moment + 1]
            left = state["missing"][moment : moment + 1]
            new = beta * old + (1 - beta) * mean ** (moment + 1)
            averages.append(torch.where(any_finite, new, old))
            missing.append(torch.where(any_finite, beta * left, left))
        first, second = (
            average / unbiased(left) for average, left in zip(averages, missing)
        )
        state = {
            **state,
            "averages": torch.cat(averages),
            "missing": torch.cat(missing),
            "mean": first,
            "scale": second.sqrt() + self.eps,
        }
        return super().balance(state, rows_RD, decide)


def scaled(state: State, rows_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are centred and divided, less nothing."""
    vectors = spoil((rows_RD - state["mean"]) / state["scale"], rows_RD)
    return vectors, torch.zeros_like(state["mean"])


def batch_mean(
    rows_RD: torch.Tensor, decide: Decisions
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(1, columns)`` mean of the finite rows, and ``(1,)`` whether there is any."""
    rows_RD = without_nan(rows_RD)
    squares = decide.whole((rows_RD * rows_RD).sum(1))
    finite = torch.isfinite(squares)
    weights = finite.to(rows_RD.dtype).unsqueeze(0)
    count = weights.sum(1)
    return weights @ rows_RD / count.clamp(min=1), count > 0


def unbiased(missing: torch.Tensor) -> torch.Tensor:
    """What an average from zero is divided by; 1 before the first batch."""
    return torch.where(missing < 1, 1 - missing, torch.ones_like(missing))
