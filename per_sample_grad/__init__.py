"""Every sample's gradient, its norm and inner products: fast and never silently wrong.

One forward pass of an ordinary module is recorded, one backward pass computes the
gradients of activations, and all answers come from the same factors, most of them
without forming a gradient.
"""

from per_sample_grad.engine.capturing import Capture, capture
from per_sample_grad.errors import CouplingError, CoverageError, PerSampleError, Refusal
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.forms import Dense, Lookup, Outer, Windows
from per_sample_grad.factors.projection import Projection
from per_sample_grad.functional import (
    Coverage,
    ParameterCoverage,
    coverage,
    per_sample_factors,
    per_sample_grad_dot,
    per_sample_grad_norms,
    per_sample_grads,
    per_sample_gram,
    weighted_grad,
)
from per_sample_grad.layers.registry import Call, register_rule
from per_sample_grad.losses import token_cross_entropy
from per_sample_grad.pool.scoring import PoolScores, score_pool

__all__ = [
    "Call",
    "Capture",
    "CouplingError",
    "Coverage",
    "CoverageError",
    "Dense",
    "Factors",
    "Lookup",
    "Outer",
    "ParameterCoverage",
    "PerSampleError",
    "PoolScores",
    "Projection",
    "Refusal",
    "Windows",
    "capture",
    "coverage",
    "per_sample_factors",
    "per_sample_grad_dot",
    "per_sample_grad_norms",
    "per_sample_grads",
    "per_sample_gram",
    "register_rule",
    "score_pool",
    "token_cross_entropy",
    "weighted_grad",
]
