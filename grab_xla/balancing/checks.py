"""Checks of options."""

from __future__ import annotations

import math
import numbers


def check_positive(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless ``value`` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def check_probability(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless ``0 < value < 1``."""
    check_positive(name, value)
    if not value < 1:  # type: ignore[operator]
        raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")


def check_integer(name: str, value: object, least: int) -> None:
    """Raises TypeError or ValueError unless ``value`` is an integer >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
