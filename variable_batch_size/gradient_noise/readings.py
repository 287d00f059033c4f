"""What is known of gradient noise once the device has been read: pure."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from variable_batch_size.gradient_noise import estimators


class Measurements(NamedTuple):
    """What is known of the gradients of all parameter groups together.

    Attributes:
        gain: Steps at the reference batch size that one of the last batch size is
            worth, by what is known now.
        noise_scale: tr Sigma / |G|^2, in samples.
        efficiency: Progress per sample, against the reference batch size.
        progress: Steps at the reference batch size that training is worth so far.
        variance: tr Sigma of one sample.
        square: |G|^2.
    """

    gain: float
    noise_scale: float
    efficiency: float
    progress: float
    variance: float
    square: float


@dataclasses.dataclass(frozen=True)
class Reading:
    """The averages of a meter, on the CPU in float64, and what follows from them.

    Attributes:
        averages: ``(3, G)``: the statistics of all parameter groups.
        batch_size: That of the last update.
        base: The batch size whose gain is one.
    """

    averages: Tensor
    batch_size: float
    base: float

    def measure(self, progress: float) -> Measurements:
        """Returns everything at once."""
        overall = estimators.overall(estimators.unbiased(self.averages))
        variance, square = overall[:2, 0].tolist()
        return Measurements(
            gain=self.gains()[0],
            noise_scale=estimators.noise_scale(variance, square),
            efficiency=self.efficiency(),
            progress=progress,
            variance=variance,
            square=square,
        )

    def gains(
        self, batch_size: float | None = None, per_group: bool = False
    ) -> list[float]:
        """Returns the gain of each parameter group, or the overall one alone.

        Of a batch size; None: the last update's.
        """
        averages = self.averages if per_group else estimators.overall(self.averages)
        ratio = torch.tensor([self._ratio(batch_size)], dtype=averages.dtype)
        gains: list[float] = estimators.gain(averages, ratio, self.base).tolist()
        return gains

    def efficiency(self, batch_size: float | None = None) -> float:
        """Returns progress per sample over the reference's; NaN if unknown."""
        if not (estimators.overall(self.averages)[:2] > 0).any():
            return math.nan
        gain = self.gains(batch_size)[0]
        return estimators.efficiency(gain, self._ratio(batch_size))

    def _ratio(self, batch_size: float | None) -> float:
        batch_size = self.batch_size if batch_size is None else batch_size
        if not batch_size > 0:
            raise ValueError(f"batch_size must be > 0, got {batch_size!r}")
        return batch_size / self.base
