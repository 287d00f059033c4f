"""Estimates the gradient noise of a training run; the estimators are public."""

# isort: off
from variable_batch_size.gradient_noise.estimators import (
    average, coefficients, estimate, gain, noise_scale, overall, unbiased, weight_of,
    weighted_coefficients,
)  # fmt: skip

__all__ = [
    "average", "coefficients", "estimate", "gain", "noise_scale", "overall", "unbiased",
    "weight_of", "weighted_coefficients",
]  # fmt: skip
