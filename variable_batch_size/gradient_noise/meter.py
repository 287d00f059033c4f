"""Measures gradient noise while training: the mutable shell of the estimators.

The squares of each minibatch's gradients are summed over replicas together with the
gradients themselves, so the statistics cost no collective, no graph and no host round
trip of their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from variable_batch_size.device_scalars import DeviceScalars, dtype_for
from variable_batch_size.gradient_noise import estimators
from variable_batch_size.gradient_noise.options import Measurements, NoiseOptions
from variable_batch_size.gradient_noise.squares import (
    GradientDifferences,
    GradientSquares,
)
from xla_replica import Replica

Groups = list[dict[str, Any]]
_STATE = ("averages", "differences", "whole", "fraction", "batch_size", "base")


class NoiseMeter:
    """Statistics of the gradients of one optimizer, on the device.

    `measure`, `gain`, `lr_factors`, `noise_scale`, `efficiency` and `progress` read
    the device back: ask them on logging steps.

    Args:
        groups: The optimizer's parameter groups.
        minibatch_size: b, in samples.
        ref_batchsize: The batch size that gains compare with; under
            ``compat='reference'`` they compare with one minibatch instead.
        replica: The replica whose gradients these are.
        scalars: Uploads numbers.
        options: See `NoiseOptions`.

    Attributes:
        dtype: The dtype of all statistics: float64 where a parameter has it, else
            float32.
    """

    def __init__(
        self,
        groups: Groups,
        minibatch_size: int,
        ref_batchsize: float,
        replica: Replica,
        scalars: DeviceScalars,
        options: NoiseOptions,
    ) -> None:
        self.options = options
        self.minibatch_size = minibatch_size
        self.ref_batchsize = ref_batchsize
        self._replica = replica
        self._scalars = scalars
        # The batch size whose gain is one.
        self._base = minibatch_size if options.compat else ref_batchsize
        self._compares = options.single_minibatch == "difference"
        self._batch_size: float = ref_batchsize  # of the last update
        self.dtype = dtype_for(p for group in groups for p in group["params"])
        self._gradients = GradientSquares(self.dtype, replica.device)
        self._averages = estimators.no_statistics(0, self.dtype, replica.device)
        self._squares = self._averages[0]  # of the step under way: (G,)
        self._differences = GradientDifferences(self._gradients, minibatch_size)
        self._progress = Progress(replica, self.dtype)
        self.watch(groups)

    # --- while training -------------------------------------------------------------

    def watch(self, groups: Groups, after_backward: bool = False) -> None:
        """Begins to see the gradients of all trainable parameters.

        Call this when the set of trainable parameters changes. Where that is noticed
        after the first backward pass of a step, the step's squares are not all known,
        and it does not count: on no replica, since the sum over them is not finite.
        """
        self._differences.forget()
        self._add_groups(len(groups) - len(self._squares))
        new = self._gradients.watch(groups)
        if new and after_backward:
            self._squares.fill_(math.nan)
        if self._compares:
            self._differences.add_parameters(new)

    def drop_discarded(self) -> None:
        """Forgets gradients that `model.zero_grad` has thrown away meanwhile."""
        self._gradients.drop_discarded()

    def end_minibatch(self) -> None:
        """Adds the minibatch's squares to the step's, in the minibatch's graph.

        Raises:
            ValueError: The minibatch had several backward passes.
        """
        squares = self._gradients.take()
        if squares is not None:
            self._squares = self._squares + squares

    def begin_update(self, num_minibatches: int, batch_size: int) -> list[torch.Tensor]:
        """Uploads what changes from update to update, ahead of the collective.

        Args:
            num_minibatches: The step's, over all replicas.
            batch_size: The step's, in samples.

        Returns:
            What is to be summed over replicas together with the gradients: ``(G,)``.
        """
        self._batch_size = batch_size
        time_constant = self.options.time_constant
        compared = self._differences.weight(num_minibatches, time_constant)
        ratio = batch_size / self._base
        values = {
            "coefficients": estimators.coefficients(
                num_minibatches, self.minibatch_size
            ),
            "base": self._base,
            "ratio": ratio,
            "weight": estimators.weight_of(num_minibatches, time_constant),
            "weight of the difference": compared,
        }
        self._uploaded = {
            name: self._scalars.get((name, "of the noise meter"), value, self.dtype)
            for name, value in values.items()
        }
        return [self._squares]

    def update(self) -> torch.Tensor:
        """Takes in the step whose averaged gradients are in ``.grad``.

        Returns:
            ``(G,)``: what multiplies the learning rate of each parameter group.
        """
        before = self._statistics()
        mean_square = self._gradients.of_gradients()
        new = estimators.estimate(
            self._squares, mean_square, self._uploaded["coefficients"]
        )
        self._averages = estimators.average(
            self._averages, new, self._uploaded["weight"]
        )
        if self._compares:
            self._differences.update(
                mean_square, self._uploaded["weight of the difference"]
            )
        statistics = before if self.options.causal else self._statistics()
        ratio, base = self._uploaded["ratio"], self._uploaded["base"]
        gain = estimators.gain(estimators.overall(statistics), ratio, base)
        self._progress.add(gain, self._batch_size / self._base)
        if self.options.per_group and len(self._squares) > 1:
            gains = estimators.gain(statistics, ratio, base)
        else:
            gains = gain.expand(len(self._squares))
        return gains * self._lr_factor if self.options.compat else gains

    def end_step(self) -> None:
        """Forgets the minibatches of the step."""
        self._gradients.discard()
        with torch.no_grad():
            self._squares.zero_()

    # --- what can be asked ----------------------------------------------------------

    @property
    def progress(self) -> float:
        """Steps at the reference batch size that training so far is worth.

        Scale-invariant iterations: the sum of the overall gains (arXiv:2007.05105).
        """
        return self._progress.read()

    @property
    def last_read_progress(self) -> float:
        """What `progress` was when the device was last read."""
        return self._progress.last_read

    @property
    def progress_bounds(self) -> tuple[float, float]:
        """The least and the most that `progress` can be; reads nothing.

        Each update adds between 1 and its batch ratio; `progress` makes both exact.
        """
        return self._progress.bounds

    def measure(self) -> Measurements:
        """Returns everything at once, with a single read of the device."""
        overall = estimators.overall(estimators.unbiased(self._read()))
        variance, square = overall[:2, 0].tolist()
        return Measurements(
            gain=self._gains_of(overall, None)[0],
            noise_scale=estimators.noise_scale(variance, square),
            efficiency=self._efficiency(overall, None),
            progress=self._progress.bounds[0],
            variance=variance,
            square=square,
        )

    def gain(self, batch_size: float | None = None) -> float:
        """Returns the overall gain of a batch size; default: that of the last update.

        Raises:
            ValueError: The batch size is not positive.
        """
        return self._gains_of(estimators.overall(self._read()), batch_size)[0]

    def lr_factors(self, batch_size: float | None = None) -> tuple[float, ...]:
        """Returns what multiplies the learning rate of each parameter group."""
        statistics = self._read()
        if not self.options.per_group:
            together = estimators.overall(statistics)
            statistics = together.expand(-1, len(self._squares))
        gains = self._gains_of(statistics, batch_size)
        return tuple(gain * self._lr_factor for gain in gains)

    def noise_scale(self) -> float:
        """Returns tr Sigma / |G|^2, in samples; NaN where nothing is known."""
        return self.measure().noise_scale

    def efficiency(self, batch_size: float | None = None) -> float:
        """Returns progress per sample against the reference; NaN if nothing is known.

        Args:
            batch_size: Default: that of the last update.
        """
        return self._efficiency(estimators.overall(self._read()), batch_size)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns averages and progress, on the CPU: a few numbers per group."""
        tensors = [self._averages, self._differences.averages]
        tensors += [self._progress.whole, self._progress.fraction]
        sizes = torch.tensor([self._batch_size, self._base], dtype=torch.float64)
        state = dict(zip(_STATE, [*self._replica.fetch(tensors), *sizes.split(1)]))
        # A run that loads the state knows its progress, and so must this one, so that
        # both read the device at the same updates.
        self._progress.note(state["whole"], state["fraction"])
        return state

    def check_state(self, state: dict[str, torch.Tensor]) -> None:
        """Raises ValueError unless `load_state_dict` can take ``state``."""
        if set(state) != set(_STATE):
            raise ValueError(
                f"this is not a state of a NoiseMeter: it has {sorted(state)}, "
                f"expected are {sorted(_STATE)}"
            )
        num_groups = state["averages"].shape[-1]
        if num_groups != len(self._squares):
            raise ValueError(
                f"the state is of {num_groups} parameter groups, and the optimizer has "
                f"{len(self._squares)}"
            )
        if state["base"].item() != self._base:
            raise ValueError(
                f"the state's gains are over {state['base'].item():g} samples, and "
                f"this meter's over {self._base:g}: use the same ref_batchsize and "
                "compat"
            )

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes what `state_dict` returned.

        Raises:
            ValueError: See `check_state`.
        """
        self.check_state(state)
        device = self._replica.device
        self._averages = state["averages"].to(self.dtype).to(device)
        self._differences.averages = state["differences"].to(self.dtype).to(device)
        self._differences.forget()
        self._batch_size = state["batch_size"].item()
        self._progress.load(state["whole"], state["fraction"])
        self._replica.sync()

    # --- how ------------------------------------------------------------------------

    @property
    def _lr_factor(self) -> float:
        """The factor between a gain and what multiplies a learning rate."""
        return self._base / self.ref_batchsize

    def _statistics(self) -> torch.Tensor:
        if not self._compares:
            return self._averages
        return estimators.best(self._averages, self._differences.averages)

    def _read(self) -> torch.Tensor:
        """Returns the statistics on the CPU: ``(3, G)``, float64."""
        state = self.state_dict()
        averages, differences = state["averages"], state["differences"]
        return estimators.best(averages.double(), differences.double())

    def _gains_of(
        self, statistics: torch.Tensor, batch_size: float | None
    ) -> list[float]:
        ratio = torch.tensor([self._ratio(batch_size)], dtype=statistics.dtype)
        return estimators.gain(statistics, ratio, self._base).tolist()

    def _efficiency(self, overall: torch.Tensor, batch_size: float | None) -> float:
        if not (overall[:2] > 0).any():
            return math.nan
        gain = self._gains_of(overall, batch_size)[0]
        return estimators.efficiency(gain, self._ratio(batch_size))

    def _ratio(self, batch_size: float | None) -> float:
        batch_size = self._batch_size if batch_size is None else batch_size
        if not batch_size > 0:
            raise ValueError(f"batch_size must be > 0, got {batch_size!r}")
        return batch_size / self._base

    def _add_groups(self, num_new: int) -> None:
        """Makes room for new parameter groups, of which nothing is known."""
        if num_new == 0:
            return
        self._averages = estimators.with_new_groups(self._averages, num_new)
        self._differences.add_groups(num_new)
        self._squares = torch.cat([self._squares, self._squares.new_zeros(num_new)])
        self._replica.sync()  # zeros on the device, not in the first graph


class Progress:
    """The sum of gains, which stays on the device, and what the host knows of it.

    Args:
        replica: The replica whose device the gains are on.
        dtype: The dtype of the gains.
    """

    def __init__(self, replica: Replica, dtype: torch.dtype) -> None:
        self._replica = replica
        # Whole steps and a fraction: one float would lose fractions as the sum grows.
        self.whole = torch.zeros(1, dtype=torch.int64, device=replica.device)
        self.fraction = torch.zeros(1, dtype=dtype, device=replica.device)
        self.bounds = (0.0, 0.0)
        self.last_read = 0.0

    def add(self, gain: torch.Tensor, batch_ratio: float) -> None:
        """Adds one update's gain, ``(1,)``, between 1 and the batch ratio."""
        total = self.fraction + gain
        whole = total.floor()
        self.whole = self.whole + whole.to(torch.int64)
        self.fraction = total - whole
        low, high = self.bounds
        self.bounds = (low + min(1.0, batch_ratio), high + max(1.0, batch_ratio))

    def read(self) -> float:
        """Returns the sum; reads the device."""
        return self.note(*self._replica.fetch([self.whole, self.fraction]))

    def note(self, whole: torch.Tensor, fraction: torch.Tensor) -> float:
        """Takes what was read of `whole` and `fraction`; returns the sum."""
        value = whole.item() + fraction.item()
        self.bounds, self.last_read = (value, value), value
        return value

    def load(self, whole: torch.Tensor, fraction: torch.Tensor) -> None:
        """Continues from what was read."""
        self.note(whole, fraction)
        self.whole = whole.to(self._replica.device)
        self.fraction = fraction.to(self.fraction.dtype).to(self._replica.device)
