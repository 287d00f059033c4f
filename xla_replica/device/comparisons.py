"""Comparisons with a number that do not become float64 on a lazy device.

torch_xla compares a tensor with a Python number in float64, for `torch.isfinite` too,
and a TPU emulates float64.
"""

from __future__ import annotations

import math

import torch

from xla_replica.device.device_traits import traits


def comparable(number: float, tensor: torch.Tensor) -> torch.Tensor | float:
    """Returns a number as what ``tensor`` is compared with in its own dtype.

    The number becomes a part of a compiled program, so it may not change.

    Args:
        number: The same one in every step.
        tensor: What it is compared with, on any device.
    """
    return tensor.new_full((), number) if traits(tensor).is_lazy else number


def where_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Returns bool: where a floating-point number is neither NaN nor infinite.

    Args:
        tensor: Of any shape, on any device.
    """
    if not traits(tensor).is_lazy:
        return torch.isfinite(tensor)
    return tensor.abs() < comparable(math.inf, tensor)
