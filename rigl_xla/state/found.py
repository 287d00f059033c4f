"""What is read from a saved state, of whichever kind."""

from __future__ import annotations

from typing import NamedTuple

from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer
from rigl_xla.layers.weights import Weight
from rigl_xla.topology.update_schedule import UpdateSchedule


class Found(NamedTuple):
    """A pruner's state, fit to a model that has not been touched."""

    weights: list[Weight]
    layers: list[SparseLayer]
    options: Options
    schedule: UpdateSchedule
    step: int
    num_updates: int


def check_shape(weight: Weight, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a saved mask of this shape is the weight's."""
    if tuple(weight.parameter.shape) != shape:
        raise ValueError(
            f"state_dict has a mask of shape {shape} for {weight.name!r}, which has "
            f"shape {tuple(weight.parameter.shape)}; it is of another model"
        )
