"""Mean balance and its variants: vectors one after the other, centred by an estimate.

GraB of Lu, Guo and De Sa (arXiv:2205.10733) and its variants, which differ in what is
centred and in the estimate of the mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

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
from grab_xla.balancing.row_by_row import balance_rows
from xla_replica import traits, where_finite
from xla_replica.common.arguments import check_integer, check_number


class Centred(Balancer):
    """Balances ``weight (row - centre) / scale``; a subclass says what these are.

    The state holds ``sums`` (accumulators + 1, columns), the signed sums and, last, the
    plain sum of what was balanced in this epoch; ``count`` (1,), the sum of the weights
    of its terms; ``mean`` (1, columns), the estimate; and what the subclass adds.
    """

    piece_size: ClassVar[int | None] = 1
    depth: ClassVar[int] = 0

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        mean = torch.zeros(1, num_columns, dtype=dtype, device=device)
        sums = mean.new_zeros(2 ** (self.depth + 1), num_columns)
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
        sums, count, parts = state["sums"], state["count"], []
        others = decide.thresholds_RN, decide.weights_R
        for tile, thresholds, weights in decide.tiles(rows_RD, *others):
            rows, centre = self.centred(state, tile)
            on_host = decide.tile_size is not None and traits(rows).is_host
            # A tile on a CPU is small, so differences are formed: with them float32
            # loses no digits where the mean is larger than they are.
            is_formed = weights is not None or (on_host and not decide.row_by_row)
            if centre is not None and is_formed:
                rows, centre = rows - centre, None
            if weights is not None:
                rows = rows * weights.unsqueeze(1)
            if decide.row_by_row:
                how = thresholds, self.depth, decide.tie
                placements = balance_rows(rows, centre, sums, *how)
                seen = (placements != 0).to(sums.dtype)
            else:
                rows = without_nan(rows)
                gram, products = decide.gram(rows, sums[:-1], centre)
                finite = where_finite(torch.diagonal(gram))
                walk = (gram, products, finite, thresholds, decide)
                signs, placements = self.walk(*walk)
                seen = finite.to(sums.dtype)
                factors = torch.cat([signs, seen.unsqueeze(1)], dim=1).T
                sums.addmm_(factors, rows)
                if centre is not None:
                    sums.addcmul_(factors.sum(1, keepdim=True), centre, value=-1)
            count = count + (seen if weights is None else seen * weights).sum()
            parts.append(placements.to(self.placement_dtype))
        placements = parts[0] if len(parts) == 1 else torch.cat(parts)
        return {**state, "sums": sums, "count": count}, placements

    def walk(
        self,
        gram_RR: Tensor,
        products_RV: Tensor,
        finite_R: Tensor,
        thresholds_RN: Tensor | None,
        decide: Decisions,
    ) -> tuple[Tensor, Tensor]:
        """Returns ``(R, V)`` signs at the accumulators, and ``(R,)`` placements."""
        limits = None if thresholds_RN is None else thresholds_RN[:, 0]
        signs = decide.signs(products_RV[:, 0], gram_RR, finite_R, limits)
        return signs.unsqueeze(1), signs


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

    The state is that of mean balance with 2^(depth + 1) - 1 accumulators; node v has
    the children 2v + 1 and 2v + 2.

    Attributes:
        depth: The number of levels below the root.
    """

    placement_dtype: ClassVar[torch.dtype] = torch.int32

    depth: int = 5  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_integer("depth", self.depth, 0)

    @property
    def num_draws(self) -> int:  # type: ignore[override]
        return self.depth + 1

    @property
    def num_leaves(self) -> int:  # type: ignore[override]
        return 2**self.depth

    def walk(
        self,
        gram_RR: Tensor,
        products_RV: Tensor,
        finite_R: Tensor,
        thresholds_RN: Tensor | None,
        decide: Decisions,
    ) -> tuple[Tensor, Tensor]:
        """Returns the signs, 0 at nodes that a sample does not pass, and placements.

        Level by level, samples at the same node are decided one after the other.
        """
        # TPUs emulate int64.
        like: dict[str, Any] = {"dtype": torch.int32, "device": gram_RR.device}
        nodes = torch.arange(products_RV.shape[1], **like)
        node = torch.zeros_like(finite_R, dtype=nodes.dtype)
        signs_RV = torch.zeros_like(products_RV)
        signs = finite_R
        for level in range(self.depth + 1):
            is_here = node.unsqueeze(1) == nodes
            products = torch.where(is_here, products_RV, torch.zeros_like(products_RV))
            together = node.unsqueeze(1) == node
            signs = decide.signs(
                products.sum(1),
                torch.where(together, gram_RR, torch.zeros_like(gram_RR)),
                finite_R,
                None if thresholds_RN is None else thresholds_RN[:, level],
            )
            signs_RV = signs_RV + is_here * signs.unsqueeze(1)
            leaf = node - (2**level - 1)
            node = 2 * node + 1 + (signs < 0).to(node.dtype)
        return signs_RV, signs * (leaf + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignBalance(MeanBalance):
    """Mean balance of the signs of the gradients' entries."""

    def centred(self, state: State, rows_RD: Tensor) -> tuple[Tensor, Tensor]:
        return mark_nonfinite(torch.sign(rows_RD), rows_RD), state["mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaMeanBalance(MeanBalance):
    """Mean balance of gradients divided by the root of their second moment.

    That is what ``sampler.sorter.update_v`` received, such as Adam's; one if it was not
    called.

    Attributes:
        eps: Added to the root.
    """

    fills: ClassVar[Mapping[str, float]] = {"scale": 1.0}
    state_methods = ("update_v",)

    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_number("eps", self.eps, above=0)

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        state = super().init(num_columns, dtype, device)
        return {**state, "scale": torch.ones_like(state["mean"])}

    def centred(self, state: State, rows_RD: Tensor) -> tuple[Tensor, None]:
        return _standardised(state, rows_RD)

    def begin_epoch(self, state: State) -> State:
        # Deviations were divided by the scale; the mean is in the gradients' unit.
        off_by = state["sums"][-1:] * state["scale"]
        sums = torch.cat([state["sums"][:-1], off_by])
        return super().begin_epoch({**state, "sums": sums})

    def update_v(self, state: State, second_moment: Tensor) -> State:
        """Returns the state with this epoch's deviations in the new unit.

        Where a second moment is negative or not finite, the scale does not change.
        """
        scale = second_moment.sqrt() + self.eps
        scale = torch.where(where_finite(scale), scale, state["scale"])
        rescaled = state["sums"][-1:] * (state["scale"] / scale)
        sums = torch.cat([state["sums"][:-1], rescaled])
        return {**state, "sums": sums, "scale": scale}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMABalance(Centred):
    """Centred by an exponential moving average of the means of the batches.

    The average includes the current batch, as in grab-sampler; so the result depends
    on how the epoch is cut into batches. The average continues from epoch to epoch.

    Attributes:
        ema_decay: The weight of the newest batch, one minus beta.
    """

    ema_decay: float = 0.1

    def __post_init__(self) -> None:
        check_number("ema_decay", self.ema_decay, above=0, below=1)

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        state = super().init(num_columns, dtype, device)
        average = torch.zeros_like(state["mean"])
        return {**state, "average": average, "missing": average.new_ones(1)}

    def begin_step(
        self, state: State, pieces: Iterable[Tensor], decide: Decisions
    ) -> State:
        mean, any_finite = _batch_mean(pieces, decide)
        average, missing, centre = _moving_average(
            state["average"], state["missing"], 1 - self.ema_decay, mean, any_finite
        )
        return {**state, "average": average, "missing": missing, "mean": centre}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaEMABalance(Centred):
    """Centred and scaled by Adam's two averages of the means of the batches.

    Attributes:
        betas: The decay of the average of the means and of that of their squares.
        eps: Added to the root of the second average.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            check_number("betas", beta, above=0, below=1)
        check_number("eps", self.eps, above=0)

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        state = super().init(num_columns, dtype, device)
        averages = state["mean"].new_zeros(2, num_columns)
        missing, scale = averages.new_ones(2), torch.ones_like(state["mean"])
        return {**state, "averages": averages, "missing": missing, "scale": scale}

    def centred(self, state: State, rows_RD: Tensor) -> tuple[Tensor, None]:
        return _standardised(state, rows_RD)

    def begin_step(
        self, state: State, pieces: Iterable[Tensor], decide: Decisions
    ) -> State:
        mean, any_finite = _batch_mean(pieces, decide)
        old = zip(state["averages"].split(1), state["missing"].split(1), self.betas)
        averages, missing, (first, second) = zip(
            *(
                _moving_average(average, left, beta, mean**power, any_finite)
                for power, (average, left, beta) in enumerate(old, start=1)
            )
        )
        new = {"averages": torch.cat(averages), "missing": torch.cat(missing)}
        return {**state, **new, "mean": first, "scale": second.sqrt() + self.eps}


def _standardised(state: State, rows_RD: Tensor) -> tuple[Tensor, None]:
    """Returns rows that are centred and scaled, and None, for no centre."""
    scaled = (rows_RD - state["mean"]).div_(state["scale"])
    return mark_nonfinite(scaled, rows_RD), None


def _batch_mean(pieces: Iterable[Tensor], decide: Decisions) -> tuple[Tensor, Tensor]:
    """Returns the mean of the finite rows, ``(1, columns)``, and whether it exists."""
    sums: tuple[Tensor, Tensor] | None = None
    for rows in pieces:
        rows = without_nan(rows)
        finite = where_finite(decide.whole(squared_norms(rows)))
        weights = finite.to(rows.dtype).unsqueeze(0)
        own = weights @ rows, weights.sum(1)
        sums = own if sums is None else (sums[0] + own[0], sums[1] + own[1])
    assert sums is not None
    total, count = sums
    return total / count.clamp(min=1), count > 0


def _moving_average(
    average: Tensor, missing: Tensor, beta: float, value: Tensor, any_finite: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a moving average with one more value, what is missing, and the estimate.

    The average began at zero; ``missing``, ``(1,)``, is one minus the sum of its
    weights and undoes the bias. The value is ignored unless ``any_finite``.
    """
    average = torch.where(any_finite, beta * average + (1 - beta) * value, average)
    missing = torch.where(any_finite, beta * missing, missing)
    # Before the first value the estimate is zero, not zero divided by zero.
    weights = torch.where(missing < 1, 1 - missing, torch.ones_like(missing))
    return average, missing, average / weights
