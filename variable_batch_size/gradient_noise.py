"""How noisy gradients are: variance and squared norm of the gradient, and what follows.

Pure functions of tensors; nothing reads a device. With b samples in a minibatch, n
minibatches in a step and B = n b: the minibatch gradients g_1 ... g_n are means over b
samples each, E||g_i||^2 = |G|^2 + tr Sigma / b, where G is the true gradient and Sigma
the covariance of a single sample's. Everything below needs two sums of a step,

    A = sum_i ||g_i||^2    and    Q = ||mean_i g_i||^2,

and does not depend on which replica ran which minibatch. Shapes: G parameter groups.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Estimate(NamedTuple):
    """Of tr Sigma and |G|^2, for each parameter group; either may be negative.

    Attributes:
        variance: ``(G,)``, tr Sigma of one sample.
        square: ``(G,)``, |G|^2.
    """

    variance: Tensor
    square: Tensor

    def overall(self) -> Estimate:
        """``(1,)``: of all groups together."""
        if len(self.variance) == 1:
            return self
        return Estimate(self.variance.sum().reshape(1), self.square.sum().reshape(1))


class Averages(NamedTuple):
    """Exponential moving averages of estimates, before division by their weight.

    Attributes:
        variance: ``(G,)``.
        square: ``(G,)``.
        weight: ``(G,)``: 0 before the first estimate, then rising to 1. Dividing by it
            removes the bias towards the zeros that averages begin with.
    """

    variance: Tensor
    square: Tensor
    weight: Tensor

    def estimate(self) -> Estimate:
        """The averages; zero where there has been no estimate."""
        weight = torch.where(self.weight > 0, self.weight, 1.0)
        return Estimate(self.variance / weight, self.square / weight)


def no_averages(
    num_groups: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Averages:
    """Averages before the first estimate."""
    return Averages(
        *(torch.zeros(num_groups, dtype=dtype, device=device) for _ in range(3))
    )


def estimate(
    minibatch_squares: Tensor,
    mean_square: Tensor,
    num_minibatches: Tensor,
    minibatch_size: int,
) -> Estimate:
    """Unbiased estimates from one step of at least two minibatches.

    The variance of a minibatch gradient is v = (A - n Q) / (n - 1); tr Sigma = b v and
    |G|^2 = Q - v / n. The same numbers as McCandlish et al. 2018 (arXiv:1812.06162,
    A.1) with batches of b and B samples.

    >>> estimate(torch.tensor([10.0]), torch.tensor([4.0]), torch.tensor([2.0]), 1)
    Estimate(variance=tensor([2.]), square=tensor([3.]))

    Args:
        minibatch_squares: ``(G,)``: A.
        mean_square: ``(G,)``: Q.
        num_minibatches: ``(1,)``: n. With 1 the result means nothing.
        minibatch_size: b, in samples.
    """
    n = num_minibatches.to(mean_square.dtype)
    variance = (minibatch_squares - n * mean_square) / (n - 1).clamp(min=1)
    return Estimate(minibatch_size * variance, mean_square - variance / n)


def estimate_from_differences(
    mean_square: Tensor,
    previous_square: Tensor,
    product: Tensor,
    minibatch_size: int,
) -> Estimate:
    """From two successive steps of one minibatch each: biased, better than nothing.

    |G|^2 = g_t . g_(t-1) and v = ||g_t - g_(t-1)||^2 / 2, which takes the drift of the
    true gradient between the steps for noise.

    Args:
        mean_square: ``(G,)``: ||g_t||^2.
        previous_square: ``(G,)``: ||g_(t-1)||^2.
        product: ``(G,)``: g_t . g_(t-1).
        minibatch_size: b, in samples.
    """
    variance = (mean_square + previous_square) / 2 - product
    return Estimate(minibatch_size * variance, product)


def weight_of(num_minibatches: int, time_constant: float) -> float:
    """What a step weighs in the averages: 1 - exp(-n / T), and 0 for one minibatch.

    Args:
        num_minibatches: n; a single one has no variance to measure.
        time_constant: T, in minibatches, whatever the number of them in a step.
    """
    if num_minibatches < 2:
        return 0.0
    return -math.expm1(-num_minibatches / time_constant)


def average(averages: Averages, new: Estimate, weight: Tensor) -> Averages:
    """Averages that include one step's estimate.

    Args:
        averages: The ones so far.
        new: The step's estimate. If it is not finite, averages stay as they are.
        weight: ``(1,)``: see `weight_of`. With 0 they stay, too.
    """
    finite = (new.variance + new.square).isfinite().all()
    values = (*new, torch.ones_like(averages.weight))
    return Averages(
        *(
            torch.where(finite, old + weight * (value - old), old)
            for old, value in zip(averages, values)
        )
    )


def gain(estimate: Estimate, batch_ratio: Tensor, ref_batchsize: float) -> Tensor:
    """``(G,)``: steps at the reference batch size that one step of this one is worth.

    r = kappa (B0 + N) / (B + N) with N = tr Sigma / |G|^2, the noise scale: kappa where
    gradients are all noise, 1 where they have none. Johnson et al. 2020
    (arXiv:2007.05105), Algorithm 1, with sigma^2 = tr Sigma / B0 and S = kappa;
    here also for batches below the reference.

    Negative estimates count as zero, and where both are, nothing is known and r is its
    lower bound. Always min(1, kappa) <= r <= max(1, kappa).

    >>> gain(Estimate(torch.ones(1), torch.ones(1)), torch.tensor([4.0]), 1)
    tensor([1.6000])

    Args:
        estimate: Of tr Sigma and |G|^2.
        batch_ratio: ``(1,)``: kappa = B / B0.
        ref_batchsize: B0, in samples.
    """
    variance = estimate.variance.clamp(min=0)
    square = ref_batchsize * estimate.square.clamp(min=0)
    total = variance + square
    # Shares of the total first: the products would overflow before the sum does.
    ratio = batch_ratio / (batch_ratio * (square / total) + variance / total)
    lowest = batch_ratio.clamp(max=1)
    ratio = torch.where(total > 0, ratio, lowest)
    return torch.clamp(ratio, lowest, batch_ratio.clamp(min=1))


def noise_scale(variance: float, square: float) -> float:
    """tr Sigma / |G|^2, in samples: B_simple of McCandlish et al. (arXiv:1812.06162).

    Batches well below it lose nothing to parallelism, batches well above it gain
    little. Infinite where |G|^2 was not above zero, NaN where nothing is known.
    """
    if square > 0:
        return max(variance, 0.0) / square
    return math.inf if variance > 0 else math.nan


def efficiency(gain: float, batch_ratio: float) -> float:
    """gain / kappa = (B0 + N) / (B + N): progress per sample against the reference.

    The statistical efficiency of Qiao et al. 2021 (Pollux, arXiv:2008.12260, 3.1).
    """
    return gain / batch_ratio
