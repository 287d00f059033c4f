"""Functions of numbers on a CPU, which Numba compiles if it is there."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any


@functools.cache
def has_numba() -> bool:
    """Returns whether Numba is installed."""
    return importlib.util.find_spec("numba") is not None


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that Numba compiles when it is called, and keeps on the disk.

    Sums may be formed in any order, so that they vectorise; NaN is preserved. What is
    kept is compiled anew when the function's own file changes, and not when the file of
    a function that it calls does: that should be the same one, or hardly ever change.
    """
    import numba

    return numba.njit(fastmath={"reassoc", "contract", "nsz"}, cache=True)(loop)
