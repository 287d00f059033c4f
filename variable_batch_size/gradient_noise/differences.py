"""Gradient noise from successive steps, for runs of one minibatch a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from variable_batch_size.gradient_noise import estimators as gradient_noise
from variable_batch_size.gradient_noise.squares import (
    GradientSquares,
    inner_product,
)


class GradientDifferences:
    """Compares each step of one minibatch with the one before; keeps a copy of it.

    Args:
        gradients: Where gradients stand.
        minibatch_size: b, in samples.
        averages: ``(3, G)``, of nothing.
    """

    def __init__(
        self, gradients: GradientSquares, minibatch_size: int, averages: torch.Tensor
    ) -> None:
        self.averages = averages
        self._gradients = gradients
        self._minibatch_size = minibatch_size
        self._previous: list[torch.Tensor] = []
        self._previous_square = torch.zeros_like(averages[1])
        self._previous_is_single = False

    def forget(self) -> None:
        """The step before is not to be compared with: it had other parameters."""
        self._previous_is_single = False

    def watch(self, new: Sequence[nn.Parameter]) -> None:
        """Makes room for new parameters."""
        self._previous += [torch.zeros_like(p).detach() for p in new]

    def grow(self, averages: torch.Tensor, num_new: int) -> None:
        """Makes room for new parameter groups, of which nothing is known."""
        self.averages = averages
        zeros = self._previous_square.new_zeros(num_new)
        self._previous_square = torch.cat([self._previous_square, zeros])

    def weight(self, num_minibatches: int, time_constant: float) -> float:
        """What the coming step weighs: two single ones count as one minibatch."""
        single = num_minibatches == 1
        counts = single and self._previous_is_single
        self._previous_is_single = single
        return -math.expm1(-1 / time_constant) if counts else 0.0

    def update(self, mean_square: torch.Tensor, weight: torch.Tensor) -> None:
        """Takes in the step whose averaged gradients stand in ``.grad``.

        Args:
            mean_square: ``(G,)``: their squared norms.
            weight: ``(1,)``: what `weight` said.
        """
        gradients = self._gradients.gradients()
        product = self._gradients.by_group(
            {
                index: inner_product(gradient, self._previous[index], mean_square.dtype)
                for index, gradient in gradients.items()
            }
        )
        new = gradient_noise.estimate_from_differences(
            mean_square, self._previous_square, product, self._minibatch_size
        )
        self.averages = gradient_noise.average(self.averages, new, weight)
        self._previous_square = mean_square
        for index, gradient in gradients.items():
            self._previous[index].copy_(gradient)
