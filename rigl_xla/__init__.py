"""Sparse training whose topology follows the gradient, without a host round trip.

from rigl_xla import RigLScheduler

pruner = RigLScheduler(model, optimizer, dense_allocation=0.1, T_end=75_000)
...
if pruner():
    optimizer.step()
"""

from rigl_xla.contrib.compact_file import load_compact, save_compact
from rigl_xla.layers.snip import global_distribution, snip_scores
from rigl_xla.layers.weights import Weight, weights_of
from rigl_xla.report.costs import (
    CostReport,
    LayerCost,
    gradual_training_ratio,
    inference_flops,
    inference_macs,
    inference_ratio,
    size_in_bytes,
    training_ratio,
)
from rigl_xla.report.positions import costs_of
from rigl_xla.report.report import LayerReport, Report, TopologyLog
from rigl_xla.scheduler import RigLScheduler
from rigl_xla.topology.distribution import DISTRIBUTIONS, allocate
from rigl_xla.topology.methods import METHODS, SCORES, Layer, Method
from rigl_xla.topology.update_schedule import ANNEALINGS, UpdateSchedule

__all__ = [
    "ANNEALINGS",
    "DISTRIBUTIONS",
    "METHODS",
    "SCORES",
    "CostReport",
    "Layer",
    "LayerCost",
    "LayerReport",
    "Method",
    "Report",
    "RigLScheduler",
    "TopologyLog",
    "UpdateSchedule",
    "Weight",
    "allocate",
    "costs_of",
    "global_distribution",
    "gradual_training_ratio",
    "inference_flops",
    "inference_macs",
    "inference_ratio",
    "load_compact",
    "save_compact",
    "size_in_bytes",
    "snip_scores",
    "training_ratio",
    "weights_of",
]
