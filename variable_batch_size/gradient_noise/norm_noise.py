"""The statistics of normalisation layers' weights, as estimates of the model's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from variable_batch_size.gradient_noise import estimators
from variable_batch_size.gradient_noise.norm_layers import NormLayer, norm_layers_of
from variable_batch_size.gradient_noise.squares import square
from xla_replica import Replica
from xla_replica.backends.small_sum import SmallSum


class NormLayerNoise:
    """Averages over steps of what normalisation layers' weights tell, sample by sample.

    Attributes:
        averages: ``(3, 1)``: the statistics of the layers' weights.
        matched: ``(3, 1)``: the same of the steps alone in which the whole gradient's
            noise was measured too.
    """

    def __init__(self, dtype: torch.dtype, replica: Replica, is_exact: bool) -> None:
        self._layers: list[NormLayer] = []  # those in use
        self._minibatch_size = 0
        self._dtype, self._replica = dtype, replica
        self.averages = estimators.no_statistics(1, dtype, replica.device)
        self.matched = estimators.no_statistics(1, dtype, replica.device)
        self._squares = SmallSum(1, dtype, replica, is_exact)
        # The step's whole gradient is measured. A compiled program always does so.
        self._measures_whole = True
        # Of the last step that did: what makes the layers' statistics the model's, and
        # what takes their place where they are not known. Nothing else changes them.
        self._of_whole: tuple[Tensor, Tensor] | None = None

    @property
    def in_use(self) -> bool:
        """Whether layers are looked at."""
        return bool(self._layers)

    def use(
        self, model: nn.Module, parameters: Iterable[nn.Parameter], minibatch_size: int
    ) -> None:
        """Looks at a model's layers from now on; see `norm_layers_of`."""
        self._minibatch_size = minibatch_size
        self._layers = norm_layers_of(model, parameters, minibatch_size, self._replica)

    def numbers(
        self, num_samples: int, num_minibatches: int, time_constant: float
    ) -> dict[str, Any]:
        """Returns what a step's `update` needs on the device, by name."""
        if not self.in_use:
            return {}
        weight = -math.expm1(-num_minibatches / time_constant)
        # A sample's part of its minibatch's mean is its gradient over the minibatch.
        scale = self._minibatch_size**2
        return {
            "coefficients of samples": tuple(
                (of_squares * scale, *others)
                for of_squares, *others in estimators.coefficients(num_samples, 1)
            ),
            "weight of samples": weight if num_samples > 1 else 0.0,
        }

    def prepare_step(self, num_minibatches: int) -> None:
        """Prepares for a step of so many minibatches, over all replicas."""
        self._measures_whole = num_minibatches > 1 or self._replica.is_lazy

    def drop_discarded(self) -> None:
        """Forgets gradients that `model.zero_grad` has thrown away meanwhile."""
        for layer in self._layers:
            layer.drop_discarded()

    def end_minibatch(self) -> None:
        """Adds the minibatch's squares to the step's, in the minibatch's graph."""
        if self._layers:
            self._squares.add(self.take())

    def take(self) -> Tensor:
        """Returns the sum of squares of all that samples add to ``.grad``: ``(1,)``.

        Once. Each adds a part of its minibatch's mean.
        """
        found = [each.samples for each in self._layers if each.samples is not None]
        for layer in self._layers:
            layer.discard()
        return self._total(found)

    def of_gradients(self) -> Tensor:
        """Returns ||gradient||^2 of what ``.grad`` of the weights holds: ``(1,)``."""
        found = [each.weight.grad for each in self._layers]
        return self._total([each.flatten() for each in found if each is not None])

    def _total(self, tensors: list[Tensor]) -> Tensor:
        """Returns the sum of all squares, ``(1,)``, of tensors that fit together."""
        if not tensors:
            return self.averages.new_zeros(1)
        return square(torch.cat(tensors, -1), self._dtype).reshape(1)

    def to_sum(self) -> list[Tensor]:
        """Returns what is to be summed over replicas, in place."""
        return [self._squares.total] if self.in_use else []

    def update(self, numbers: dict[str, Tensor], weight_of_whole: Tensor) -> None:
        """Takes in a step, whose averaged gradients are in ``.grad``.

        Args:
            numbers: Those of `numbers`, on the device.
            weight_of_whole: ``(1,)``: the step's weight in the averages of the whole
                gradient; 0 where it was not measured.
        """
        if not self._layers:
            return
        coefficients = numbers["coefficients of samples"]
        squares = self._squares.value(), self.of_gradients()
        new = estimators.estimate(*squares, coefficients)
        self.averages = estimators.average(
            self.averages, new, numbers["weight of samples"]
        )
        if self._measures_whole:
            self.matched = estimators.average(self.matched, new, weight_of_whole)
            self._of_whole = None

    def clear(self) -> list[Tensor]:
        """Forgets the minibatches of the step; returns what is to be zeroed."""
        for layer in self._layers:
            layer.discard()
        return self.to_sum()

    def statistics(self, whole: Tensor) -> Tensor:
        """Returns the model's statistics, by the best estimator: ``(3, 1)``.

        Args:
            whole: ``(3, G)``: the averages of all parameters.
        """
        if self._of_whole is None:
            self._of_whole = of_whole(self.matched, whole)
        scale, overall = self._of_whole
        return estimators.best(self.averages * scale, overall)

    def state(self) -> Tensor:
        """Returns both statistics, one after the other: ``(6, 1)``."""
        return torch.cat([self.averages, self.matched])

    def load_state(self, state: Tensor) -> None:
        """Takes what `state` returned."""
        # Split on the host: TorchTPU would make one program of that and what is next,
        # which no other start has, and compile it.
        parts = state.to(self._dtype).clone().split(3)
        self.averages, self.matched = self._replica.send(parts)
        self._of_whole = None


def noise_factor(matched: Tensor, whole: Tensor) -> Tensor:
    """Returns the noise scale of all parameters over that of the layers: ``(1,)``.

    NaN where either is unknown, or not above zero.

    Args:
        matched: ``(3, 1)``: the layers' statistics of the steps of ``whole``.
        whole: ``(3, 1)``: the statistics of all parameters.
    """
    is_known = (torch.cat([whole, matched]) > 0).all()
    factor = (whole[0] / matched[0]) * (matched[1] / whole[1])
    return torch.where(is_known, factor, torch.full_like(factor, math.nan))


def of_whole(matched: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what the layers' statistics are corrected by, and replaced by.

    Args:
        matched: ``(3, 1)``: the layers' statistics of the steps of ``whole``.
        whole: ``(3, G)``: the averages of all parameters.

    Returns:
        What multiplies the layers' statistics to have the model's, ``(3, 1)``:
        `noise_factor`, or one as long as it is unknown; and those of all parameters
        together, ``(3, 1)``, for where the layers' are not known.
    """
    overall = estimators.overall(whole)
    factor = noise_factor(matched, overall)
    one = torch.ones_like(factor)
    known = torch.where(factor == factor, factor, one)
    return torch.stack([known, one, one]), overall
