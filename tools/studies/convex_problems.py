"""Convex problems of scikit-learn's data sets, with gradients of single samples.

They are generalised linear models: the loss of a sample depends on its scores W x, and
its derivative by the scores is (prediction - target), so that a sample's gradient is an
outer product. Everything is in float64.

    n: samples; B: samples of a batch; C: scores per sample; D: features, with the 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from sklearn import datasets

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Problem:
    """F(W) = mean over samples of loss(W x, y) + regularisation / 2 ||W||^2.

    Attributes:
        features: ``(n, D)``: those of the data set, and a column of ones.
        targets: ``(n, C)``: one-hot classes, or a standardised number.
        regularisation: A number above zero, so that F has one minimum. It includes
            the weights of the column of ones.
        classify: Whether the loss is cross entropy; otherwise half the squared error.
    """

    features: Tensor
    targets: Tensor
    regularisation: float
    classify: bool

    def initial(self) -> Tensor:
        """Returns the initial weights: zeros ``(C, D)``."""
        return self.features.new_zeros(self.targets.shape[1], self.features.shape[1])

    def value(self, weights: Tensor) -> Tensor:
        """Returns F, a 0-d tensor."""
        scores = self.features @ weights.T
        if self.classify:
            losses = scores.logsumexp(1) - (scores * self.targets).sum(1)
        else:
            losses = (scores - self.targets).square().sum(1) / 2
        return losses.mean() + self.regularisation / 2 * weights.square().sum()

    def gradients(self, weights: Tensor, batch: Tensor) -> Tensor:
        """Returns gradients of each sample's loss with regularisation, ``(B, C, D)``.

        Args:
            weights: ``(C, D)``.
            batch: ``(B,)``: indices of samples.
        """
        features = self.features[batch]
        scores = features @ weights.T
        predictions = scores.softmax(1) if self.classify else scores
        errors = predictions - self.targets[batch]
        outer = errors[:, :, None] * features[:, None, :]
        return outer + self.regularisation * weights

    def minimum(self, tolerance: float = 1e-13) -> float:
        """Returns F at its minimum, by Newton's method with halved steps.

        Args:
            tolerance: What F may still lose, by the quadratic model.

        Raises:
            RuntimeError: The minimum is not reached within a hundred steps.
        """
        weights = self.initial()
        everything = torch.arange(len(self.features))
        for _ in range(100):
            value = self.value(weights)
            gradient = self.gradients(weights, everything).mean(0).flatten()
            hessian = torch.func.hessian(self.value)(weights)
            hessian = hessian.reshape(gradient.numel(), -1)
            direction = -torch.linalg.solve(hessian, gradient)
            decrease = -(gradient @ direction)
            if decrease / 2 < tolerance:
                return value.item()
            size = 1.0
            direction = direction.reshape(weights.shape)
            while self.value(weights + size * direction) > value - size * decrease / 4:
                size /= 2
            weights = weights + size * direction
        raise RuntimeError(
            f"after 100 steps F could still lose {decrease / 2:.1e}, more than "
            f"tolerance={tolerance:.0e}"
        )


def make_problem(
    load: Callable[..., tuple],
    regularisation: float,
    classify: bool,
    unit: float | None,
    multiple: int,
) -> Problem:
    """Returns a problem with a data set's first samples, a multiple of ``multiple``.

    Args:
        load: A function of scikit-learn.
        regularisation, classify: See `Problem`.
        unit: What all features are divided by. None standardises each of them.
        multiple: What divides the number of samples.
    """
    inputs, outputs = load(return_X_y=True)
    length = len(inputs) - len(inputs) % multiple
    features = torch.from_numpy(inputs[:length]).double()
    features = standardised(features) if unit is None else features / unit
    features = torch.cat([features, torch.ones(length, 1, dtype=features.dtype)], 1)
    outputs = torch.from_numpy(outputs[:length])
    if classify:
        targets = torch.nn.functional.one_hot(outputs.long()).double()
    else:
        targets = standardised(outputs.double()[:, None])
    return Problem(features, targets, regularisation, classify)


def standardised(columns: Tensor) -> Tensor:
    """Returns columns of mean 0 and variance 1, or zeros where one never changes."""
    centred = columns - columns.mean(0)
    spread = centred.square().mean(0).sqrt()
    return centred / torch.where(spread > 1e-12, spread, 1.0)


# The arguments of `make_problem` but for the last, by name. All pixels have one unit.
# If each is standardised instead, those at the edge of the image, which are hardly ever
# inked, reach 42 standard deviations; a few samples then outweigh the others, and
# orders matter less.
PROBLEMS = {
    "breast_cancer": (datasets.load_breast_cancer, 1e-2, True, None),
    "diabetes": (datasets.load_diabetes, 1e-2, False, None),
    "digits": (datasets.load_digits, 1e-3, True, 16),
    "digits-standardised": (datasets.load_digits, 1e-3, True, None),
}
