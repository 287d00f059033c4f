"""Sparse training whose topology follows the gradient, without a host round trip.

from rigl_xla import RigLScheduler

pruner = RigLScheduler(model, optimizer, dense_allocation=0.1, T_end=75_000)
...
if pruner():
    optimizer.step()
"""

from rigl_xla.layers.weights import Weight, weights_of
from rigl_xla.report.costs import Cost, cost_of
from rigl_xla.report.report import LayerReport, Report, operations_of
from rigl_xla.scheduler import RigLScheduler
from rigl_xla.topology.distribution import DISTRIBUTIONS, allocate
from rigl_xla.topology.methods import METHODS, SCORES, Layer, Method
from rigl_xla.topology.update_schedule import ANNEALINGS, UpdateSchedule

__all__ = [
    "ANNEALINGS",
    "DISTRIBUTIONS",
    "METHODS",
    "SCORES",
    "Cost",
    "Layer",
    "LayerReport",
    "Method",
    "Report",
    "RigLScheduler",
    "UpdateSchedule",
    "Weight",
    "allocate",
    "cost_of",
    "operations_of",
    "weights_of",
]
