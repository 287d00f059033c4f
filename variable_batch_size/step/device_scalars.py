"""Numbers that change from step to step, as tensors on the device, and back."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch

from xla_replica import Replica


class Numbers:
    """Changing numbers on the device, uploaded once per value and use.

    By use, because two uses that shared a tensor when their values are equal would
    make another graph of it.

    Args:
        replica: Where they go.
        capacity: Values kept; beyond it the oldest is uploaded again when it returns.
    """

    def __init__(self, replica: Replica, capacity: int = 1024) -> None:
        self._replica = replica
        self._capacity = capacity
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}

    def get(
        self,
        use: object,
        value: float | tuple[tuple[float, ...], ...],
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """A number, with shape ``(1,)``, or a matrix; not to be changed in place."""
        key = (use, value, dtype)
        if key not in self._kept:
            if len(self._kept) >= self._capacity:
                del self._kept[next(iter(self._kept))]
            if isinstance(value, tuple):
                tensor = self._replica.send(torch.tensor(value, dtype=dtype))
            else:
                tensor = self._replica.scalar(value, dtype)
            self._kept[key] = tensor
        return self._kept[key]


def widest(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """float64 where a parameter is, else float32: the precision numbers need."""
    wide = any(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.float64 if wide else torch.float32


def as_floats(numbers: tuple[Any, ...], replica: Replica) -> tuple[float, ...]:
    """Reads those that are tensors, at once."""
    if any(isinstance(number, torch.Tensor) for number in numbers):
        return tuple(tensor.item() for tensor in replica.fetch(list(numbers)))
    return numbers


def as_positive(name: str, value: Any) -> float:
    """``value`` as a float.

    Raises:
        TypeError, ValueError: It is no number, or not positive and finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return float(value)
