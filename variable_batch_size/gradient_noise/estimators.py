"""How noisy gradients are: variance and squared norm of the gradient, and what follows.

Pure functions of tensors; nothing reads a device. With b samples in a minibatch, n
minibatches in a step and B = n b: the minibatch gradients g_1 ... g_n are means over b
samples each, E||g_i||^2 = |G|^2 + tr Sigma / b, where G is the true gradient and Sigma
the covariance of a single sample's. Everything below needs two sums of a step,

    A = sum_i ||g_i||^2    and    Q = ||mean_i g_i||^2,

and does not depend on which replica ran which minibatch. Operands are tensors where a
lazy backend would upload a Python number in every step.

**Statistics** are tensors of shape ``(3, G)`` for G parameter groups: tr Sigma of one
sample, |G|^2, and the weight they carry. An estimate has weight 1; averages begin with
weight 0, and dividing by it removes the bias towards the zeros they begin with.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor
Matrix = tuple[tuple[float, ...], ...]


def coefficients(num_minibatches: int, minibatch_size: int) -> Matrix:
    """Returns unbiased estimates from one step, linear in A and Q: ``(3, 3)``.

    The variance of a minibatch gradient is v = (A - n Q) / (n - 1); tr Sigma = b v and
    |G|^2 = Q - v / n. The same numbers as McCandlish et al. 2018 (arXiv:1812.06162,
    A.1) with batches of b and B samples.

    Args:
        num_minibatches: n. One has no variance to measure: all zeros.
        minibatch_size: b, in samples.

    Returns:
        What multiplies (A, Q, 1) to make (tr Sigma, |G|^2, 1).
    """
    n, b = num_minibatches, minibatch_size
    if n < 2:
        return ((0.0,) * 3,) * 3
    return (
        (b / (n - 1), -b * n / (n - 1), 0.0),
        (-1 / (n * (n - 1)), n / (n - 1), 0.0),
        (0.0, 0.0, 1.0),
    )


def weighted_coefficients(num_minibatches: Tensor, total: Tensor) -> Tensor:
    """Returns `coefficients` where minibatches have weights: ``(3, 3, 1)``.

    Let minibatch i sum the gradients of w_i units (tokens) to S_i, and W be the sum of
    the w_i. Then A = sum_i ||S_i||^2 / w_i has the expectation W |G|^2 + n tr Sigma of
    one unit, and Q = ||sum_i S_i / W||^2 has |G|^2 + tr Sigma / W, so that

        tr Sigma = (A - W Q) / (n - 1)      |G|^2 = Q - tr Sigma / W

    are unbiased, as `coefficients` are, whose numbers they are if all w_i are b and A
    is b times theirs.

    Args:
        num_minibatches: ``(1,)``: n, those of a weight above zero.
        total: ``(1,)``: W.

    Returns:
        What multiplies (A, Q, 1) to make (tr Sigma, |G|^2, 1); zeros below n = 2.
    """
    several = num_minibatches > 1
    one, zero = torch.ones_like(total), torch.zeros_like(total)
    rest = torch.where(several, num_minibatches - 1, one)
    total = torch.where(several, total, one)
    rows = [
        torch.stack([1 / rest, -total / rest, zero]),
        torch.stack([-1 / (total * rest), one + 1 / rest, zero]),
        torch.stack([zero, zero, one]),
    ]
    return torch.where(several, torch.stack(rows), zero)


def estimate(minibatch_squares: Tensor, mean_square: Tensor, matrix: Tensor) -> Tensor:
    """Returns the statistics of one step, of weight 1: ``(3, G)``.

    >>> matrix = torch.tensor(coefficients(num_minibatches=2, minibatch_size=1))
    >>> estimate(torch.tensor([10.0]), torch.tensor([4.0]), matrix)
    tensor([[2.],
            [3.],
            [1.]])

    Args:
        minibatch_squares: ``(G,)``: A.
        mean_square: ``(G,)``: Q.
        matrix: ``(3, 3)``: `coefficients`; or ``(3, 3, 1)``, which saves an operation.
    """
    sums = torch.stack([minibatch_squares, mean_square, torch.ones_like(mean_square)])
    # Not a matrix product, which a TPU computes from bfloat16 factors.
    return (matrix.reshape(3, 3, 1) * sums).sum(1)


def weight_of(num_minibatches: int, time_constant: float) -> float:
    """Returns a step's weight in the averages: 1 - exp(-n / T), or 0 if n is 1.

    T, the time constant, is in minibatches, whatever the number n of them in a step.
    """
    if num_minibatches < 2:
        return 0.0
    return -math.expm1(-num_minibatches / time_constant)


def average(averages: Tensor, new: Tensor, weight: Tensor) -> Tensor:
    """Returns averages that include one step's estimate: ``(3, G)``.

    They stay as they are if ``weight``, ``(1,)``, is 0 or the new ones are not finite.
    """
    finite = (new - new == 0).all()  # inf - inf and nan - nan are nan
    return torch.where(finite, torch.lerp(averages, new, weight), averages)


def unbiased(averages: Tensor) -> Tensor:
    """Returns averages over their weight, zeros where nothing is known: ``(3, G)``."""
    weight = averages[2]
    return averages / torch.where(weight > 0, weight, 1.0)


def overall(statistics: Tensor) -> Tensor:
    """Returns those of all groups together, without a useful weight: ``(3, 1)``."""
    if statistics.shape[1] == 1:
        return statistics
    return unbiased(statistics).sum(1, keepdim=True)


def gain(
    statistics: Tensor, batch_ratio: Tensor, ref_batchsize: float | Tensor
) -> Tensor:
    """Returns how many steps at the reference one of this size is worth: ``(G,)``.

    r = kappa (B0 + N) / (B + N) with N = tr Sigma / |G|^2, the noise scale: kappa where
    gradients are all noise, 1 where they have none. Johnson et al. 2020
    (arXiv:2007.05105), Algorithm 1, with sigma^2 = tr Sigma / B0 and S = kappa;
    here also for batches below the reference.

    The weight does not matter. Negative numbers count as zero, and where both are,
    nothing is known and r is its lower bound.
    Always min(1, kappa) <= r <= max(1, kappa).

    >>> gain(torch.ones(3, 1), torch.tensor([4.0]), ref_batchsize=1)
    tensor([1.6000])

    Args:
        statistics: ``(3, G)``.
        batch_ratio: ``(1,)``: kappa = B / B0.
        ref_batchsize: B0, in samples: a number, or ``(1,)``.
    """
    variance, square, _ = statistics.relu().unbind()
    square = ref_batchsize * square
    total = variance + square
    # A share first: the products would overflow before the sum does.
    share = torch.where(total > 0, square / total, batch_ratio > 1)
    ratio = batch_ratio.to(share.dtype)
    return ratio / torch.lerp(torch.ones_like(share), ratio, share)


def noise_scale(variance: float, square: float) -> float:
    """Returns tr Sigma / |G|^2, in samples: B_simple of arXiv:1812.06162.

    Batches well below it lose nothing to parallelism, batches well above it gain
    little. Infinite where |G|^2 was not above zero, NaN where nothing is known.
    """
    if square > 0:
        return max(variance, 0.0) / square
    return math.inf if variance > 0 else math.nan
