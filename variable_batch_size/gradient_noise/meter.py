"""Measures gradient noise while training: the mutable shell of the estimators.

The squares of each minibatch's gradients are summed over replicas together with the
gradients themselves, so the statistics cost no collective, no graph and no host round
trip of their own.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any, NamedTuple

import torch

from variable_batch_size.data.schedule import Step
from variable_batch_size.device_scalars import dtype_for
from variable_batch_size.gradient_noise import estimators
from variable_batch_size.gradient_noise.squares import GradientSquares, Groups
from variable_batch_size.part import Part
from xla_replica.common.arguments import check_fields, check_number, checked
from xla_replica.common.differences import check_same
from xla_replica.device.row_units import SmallSum

logger = logging.getLogger(__name__)
# After so many steps without a finite square somebody is told.
_MOST_UNKNOWN = 3
_STATE = ("averages", "whole", "fraction", "batch_size", "base")


@dataclasses.dataclass(frozen=True)
class NoiseOptions:
    """How gradient noise is measured and used.

    Attributes:
        time_constant: Time constant of the moving averages, in minibatches; > 0.
        per_group: Each parameter group has its own gain; otherwise all have the
            overall one.
        causal: The gain comes from the steps before this one, so that a step's noise
            does not choose its own learning rate.

    Raises:
        TypeError, ValueError: An option is of the wrong type, or not allowed.
    """

    time_constant: float = checked(1000.0, above=0)
    per_group: bool = True
    causal: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


class Measurements(NamedTuple):
    """What is known of the gradients of all parameter groups together.

    Attributes:
        gain: Steps at the reference batch size that one of the last batch size is
            worth, by what is known now.
        noise_scale: tr Sigma / |G|^2, in samples; NaN where nothing is known.
        efficiency: Progress per sample, against the reference batch size; NaN too. Of
            Qiao et al. 2021 (Pollux, arXiv:2008.12260, 3.1).
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


class NoiseMeter(Part):
    """Statistics of the gradients of one optimizer, on the device.

    `measure`, `lr_factors` and `progress` read the device back: ask them on logging
    steps.

    Args:
        run: The wrapper's arguments, a `Run`. If minibatches have weights, a unit of
            weight, such as a token, takes the place of a sample.
        ref_batchsize: The batch size that gains compare with.
        options: See `NoiseOptions`.

    Attributes:
        dtype: The dtype of all statistics: float64 where a parameter has it, else
            float32.
        weighted: Whether minibatches have weights.
        weights: The part that then has the weight of a step.
        gains: What multiplied the learning rate of each parameter group in the last
            update: ``(G,)``.
    """

    weights: Any = None
    gains: torch.Tensor | None = None

    def __init__(self, run: Any, ref_batchsize: float, options: NoiseOptions) -> None:
        self.options, self.weighted = options, run.reduction == "sum"
        self._minibatch_size = run.sampler.minibatch_size  # b, in samples
        self._replica, self._scalars = run.replica, run.scalars
        replica, groups = run.replica, run.inner.param_groups
        self._base = ref_batchsize  # whose gain is one
        self._batch_size: float = ref_batchsize  # of the last update
        self.dtype = dtype_for(p for group in groups for p in group["params"])
        is_exact = run.sums.is_exact
        self._gradients = GradientSquares(self.dtype, replica, is_exact)
        self._num_measured: float = 0  # steps that should have told of the noise
        self._averages = torch.zeros(3, 0, dtype=self.dtype, device=replica.device)
        # Of the step under way: (G,), and the number of minibatches with a weight.
        self._squares = SmallSum(0, self.dtype, replica, is_exact)
        self._count = self._averages.new_zeros(1)
        # An integer and a fraction: one float would lose fractions as it grows.
        zeros = self._averages.new_zeros
        self._progress = zeros(1, dtype=torch.int64), zeros(1)
        self._uploaded: dict[str, torch.Tensor] = {}
        self.watch(groups)

    # --- while training -------------------------------------------------------------

    def watch(self, groups: Groups, after_backward: bool = False) -> None:
        """Begins to see the gradients of all trainable parameters.

        Call this when the set of trainable parameters changes. Where that is noticed
        after the first backward pass of a step, the step's squares are not all known,
        and it does not count: on no replica, since the sum over them is not finite.
        """
        if num_new := len(groups) - self._averages.shape[1]:
            new = self._averages.new_zeros(3, num_new)
            self._averages = torch.cat([self._averages, new], dim=1)
            self._squares.grow(num_new)
            self._replica.sync()  # zeros on the device, not in the first graph
        if self._gradients.watch(groups) and after_backward:
            self._squares.spoil()

    def begin_minibatch(self, step: Step | None) -> None:
        """Prepares for a minibatch of a step.

        The only one tells nothing of the noise by its gradients, which are not looked
        at; where programs are compiled they are, which makes one program of all steps.
        """
        unused = step is not None and step.num_minibatches == 1 and not self.weighted
        self._gradients.paused |= unused and not self._replica.is_lazy

    def end_minibatch(self, weight: torch.Tensor | None) -> None:
        """Adds the minibatch's squares to the step's, in the minibatch's graph.

        Args:
            weight: ``(1,)``, if minibatches have weights. One of weight zero tells
                nothing of the noise.
        """
        squares = self._gradients.take()
        if squares is None:
            return
        if weight is not None:
            counts = weight > 0
            squares = torch.where(counts, squares / weight, torch.zeros_like(squares))
            self._count = self._count + counts
        self._squares.add(squares)

    def prepare(self, step: Step) -> None:
        """Uploads what changes from update to update, ahead of the collective."""
        num_minibatches = step.num_minibatches
        time_constant = self.options.time_constant
        values: dict[str, Any] = {"base": self._base}
        if self.weighted:
            values["time constant"] = time_constant
        else:
            matrix = estimators.coefficients(num_minibatches, self._minibatch_size)
            values["coefficients"] = matrix
            values["ratio"] = step.batch_size / self._base
            values["weight"] = estimators.weight_of(num_minibatches, time_constant)
            self._batch_size = step.batch_size
        self._uploaded = {
            name: self._scalars.get((name, "of the noise meter"), value, self.dtype)
            for name, value in values.items()
        }
        self._num_measured += num_minibatches > 1
        if self._gradients.paused and num_minibatches > 1:
            # Another epoch than was prepared for: it does not count, on any replica.
            self._gradients.paused = False
            self._squares.spoil()

    def tensors(self) -> list[torch.Tensor]:
        """Returns ``(G,)`` and, if they have weights, how many minibatches have one."""
        return [self._squares.total, *([self._count] if self.weighted else [])]

    def commit(self, step: Step) -> None:
        """Makes `gains` of the step whose averaged gradients are in ``.grad``."""
        before, num_groups = self._averages, self._averages.shape[1]
        numbers = self._uploaded
        if self.weighted:
            self._weigh(self.weights.weight)
        if not self._gradients.paused:
            mean_square, squares = self._gradients.of_gradients(), self._squares.value()
            new = estimators.estimate(squares, mean_square, numbers["coefficients"])
            self._averages = estimators.average(before, new, numbers["weight"])
        statistics = before if self.options.causal else self._averages
        ratio, base = numbers["ratio"], numbers["base"]
        gain = estimators.gain(estimators.overall(statistics), ratio, base)
        whole, fraction = self._progress
        total = fraction + gain
        floor = total.floor()
        self._progress = (whole + floor.to(torch.int64), total - floor)
        if self.options.per_group and num_groups > 1:
            self.gains = estimators.gain(statistics, ratio, base)
        else:
            self.gains = gain.expand(num_groups)

    def clear(self) -> None:
        """Forgets the minibatches of the step."""
        self._gradients.discard()
        self._gradients.paused = False
        torch._foreach_zero_([self._squares.total, self._count])

    # --- what can be asked ----------------------------------------------------------

    @property
    def progress(self) -> float:
        """Steps at the reference batch size that training so far is worth.

        Scale-invariant iterations: the sum of the overall gains (arXiv:2007.05105).
        """
        return self._read()[1]

    def measure(self, batch_size: float | None = None) -> Measurements:
        """Returns everything at once, with a single read of the device.

        Args:
            batch_size: For which gain and efficiency are; default: the last update's.
        """
        averages, progress = self._read()
        overall = estimators.overall(estimators.unbiased(averages))
        variance, square = overall[:2, 0].tolist()
        gain = self._gains(estimators.overall(averages), batch_size)[0]
        noise_scale = estimators.noise_scale(variance, square)
        efficiency = gain / self._ratio(batch_size)  # (B0 + N) / (B + N)
        efficiency = efficiency if variance > 0 or square > 0 else math.nan
        return Measurements(gain, noise_scale, efficiency, progress, variance, square)

    def lr_factors(self, batch_size: float | None = None) -> tuple[float, ...]:
        """Returns what multiplies the learning rate of each parameter group."""
        averages, _ = self._read()
        if not self.options.per_group:
            averages = estimators.overall(averages).expand(-1, averages.shape[1])
        return tuple(self._gains(averages, batch_size))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns averages and progress, on the CPU: a few numbers per group."""
        state = self._averages, *self._progress, self._batch_size
        *tensors, size = self._replica.to_host(state)
        self._batch_size = float(size)
        sizes = torch.tensor([self._batch_size, self._base], dtype=torch.float64)
        return dict(zip(_STATE, [*tensors, *sizes.split(1)]))

    def check_state(self, state: dict[str, torch.Tensor]) -> None:
        """Raises ValueError unless `load_state_dict` can take ``state``."""
        num_groups, base = self._averages.shape[1], float(self._base)
        own = {"groups": num_groups, "reference batch size": base}
        saved = state["averages"].shape[-1], state["base"].item()
        what = "the saved noise is of other parameter groups or another reference"
        remedy = "Use the same groups and ref_batchsize"
        check_same(dict(zip(own, saved)), own, what, remedy)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes what `state_dict` returned; see `check_state`."""
        self.check_state(state)
        device = self._replica.device
        self._averages = state["averages"].to(self.dtype).to(device)
        self._batch_size = state["batch_size"].item()
        whole, fraction = state["whole"], state["fraction"]
        self._progress = whole.to(device), fraction.to(self.dtype).to(device)
        self._replica.sync()

    # --- how ------------------------------------------------------------------------

    def _weigh(self, total: Any) -> None:
        """Computes from a step's weight and count what `prepare` else uploads."""
        self._batch_size = total
        numbers = self._uploaded
        if not isinstance(total, torch.Tensor):
            total = torch.full_like(self._count, total)
        numbers["coefficients"] = estimators.weighted_coefficients(self._count, total)
        numbers["ratio"] = total / numbers["base"]
        weight = -torch.expm1(-self._count / numbers["time constant"])
        numbers["weight"] = torch.where(self._count > 1, weight, weight * 0)

    def _gains(self, averages: torch.Tensor, batch_size: float | None) -> list[float]:
        """Returns the gain of each group; by averages that have been read."""
        kappa = torch.tensor([self._ratio(batch_size)], dtype=averages.dtype)
        gains: list[float] = estimators.gain(averages, kappa, self._base).tolist()
        return gains

    def _ratio(self, batch_size: float | None) -> float:
        batch_size = self._batch_size if batch_size is None else batch_size
        return check_number("batch_size", batch_size, above=0) / self._base

    def _read(self) -> tuple[torch.Tensor, float]:
        """Returns the averages, on the CPU in float64, and the progress."""
        state = self.state_dict()
        averages = state["averages"].double()
        if self._num_measured >= _MOST_UNKNOWN and not averages[2].any():
            self._num_measured = -math.inf  # said once
            logger.warning(
                f"the noise of {_MOST_UNKNOWN} steps is unknown, because squares of "
                f"their gradients are not finite in {self.dtype}: scale the loss, or "
                "train in float64; gains are 1 until then"
            )
        return averages, state["whole"].item() + state["fraction"].item()
