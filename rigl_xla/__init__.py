"""Sparse training whose topology follows the gradient, without a host round trip.

from rigl_xla import RigLScheduler

pruner = RigLScheduler(model, optimizer, dense_allocation=0.1, T_end=75_000)
...
if pruner():
    optimizer.step()
"""

from rigl_xla.distribution import DISTRIBUTIONS, allocate
from rigl_xla.layers import Weight, weights_of
from rigl_xla.methods import METHODS, SCORES, Layer
from rigl_xla.report import LayerReport, Report
from rigl_xla.schedule import ANNEALINGS, UpdateSchedule
from rigl_xla.scheduler import RigLScheduler

__all__ = [
    "ANNEALINGS",
    "DISTRIBUTIONS",
    "METHODS",
    "SCORES",
    "Layer",
    "LayerReport",
    "Report",
    "RigLScheduler",
    "UpdateSchedule",
    "Weight",
    "allocate",
    "weights_of",
]
