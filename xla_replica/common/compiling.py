"""Whether loops can be compiled for a CPU."""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def has_numba() -> bool:
    """Returns whether Numba is installed."""
    return importlib.util.find_spec("numba") is not None
