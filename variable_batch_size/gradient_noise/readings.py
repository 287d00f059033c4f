"""What is known of gradient noise once the device has been read: pure."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from variable_batch_size.gradient_noise import estimators
from variable_batch_size.gradient_noise.norm_noise import noise_factor, of_whole


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
        norm_factor: The noise scale of all parameters over that of the normalisation
            layers' weights, which is in the numbers already; one as long as the two
            have not been measured together. See `NoiseMeter.estimator`.
    """

    gain: float
    noise_scale: float
    efficiency: float
    progress: float
    variance: float
    square: float
    norm_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Reading:
    """The averages of a meter, on the CPU in float64, and what follows from them.

    Attributes:
        whole: ``(3, G)``: the statistics of all parameters, by a step's minibatches.
        norm_layers: ``(6, 1)``: `NormLayerNoise.state`; None where it is not in use.
        batch_size: That of the last update.
        base: The batch size whose gain is one.
    """

    whole: Tensor
    norm_layers: Tensor | None
    batch_size: float
    base: float

    @property
    def estimator(self) -> str:
        """Whose numbers these are; see `NoiseMeter`."""
        if self.norm_layers is not None and self.norm_layers[2] > 0:
            unknown = math.isnan(self._norm_factor(self.norm_layers))
            return f"norm layers{', factor unknown' if unknown else ''}"
        return "minibatches" if (self.whole[2] > 0).any() else "nothing"

    def measure(self, progress: float) -> Measurements:
        """Returns everything at once."""
        overall = estimators.overall(estimators.unbiased(self._best))
        variance, square = overall[:2, 0].tolist()
        layers = self.norm_layers
        factor = math.nan if layers is None else self._norm_factor(layers)
        return Measurements(
            norm_factor=1.0 if math.isnan(factor) else factor,
            gain=self.gains()[0],
            noise_scale=estimators.noise_scale(variance, square),
            efficiency=self.efficiency(),
            progress=progress,
            variance=variance,
            square=square,
        )

    def gains(
        self, batch_size: float | None = None, num_groups: int = 1, whole: bool = True
    ) -> list[float]:
        """Returns the gain of each parameter group: its own, or the overall one.

        Of a batch size; None: the last update's.
        """
        statistics = estimators.overall(self._best) if whole else self._best
        ratio = torch.tensor([self._ratio(batch_size)], dtype=statistics.dtype)
        gains = estimators.gain(statistics, ratio, self.base)
        return gains.expand(num_groups).tolist()

    def efficiency(self, batch_size: float | None = None) -> float:
        """Returns progress per sample over the reference's; NaN if unknown."""
        if not (estimators.overall(self._best)[:2] > 0).any():
            return math.nan
        gain = self.gains(batch_size)[0]
        return estimators.efficiency(gain, self._ratio(batch_size))

    @property
    def _best(self) -> Tensor:
        if self.norm_layers is None:
            return self.whole
        averages, matched = self.norm_layers.split(3)
        scale, overall = of_whole(matched, self.whole)
        return estimators.best(averages * scale, overall)

    def _norm_factor(self, norm_layers: Tensor) -> float:
        return noise_factor(norm_layers[3:], estimators.overall(self.whole)).item()

    def _ratio(self, batch_size: float | None) -> float:
        batch_size = self.batch_size if batch_size is None else batch_size
        if not batch_size > 0:
            raise ValueError(f"batch_size must be > 0, got {batch_size!r}")
        return batch_size / self.base
