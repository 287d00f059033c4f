"""Arrays at addresses, for loops that Numba compiles and that are given many tensors.

A call of a compiled function takes longer with every array and tuple that it is given;
a matrix of integers is one argument. It imports Numba, so import it where that is
installed. Whoever gives an address keeps the tensor until the loop has ended.
"""

# Numba infers types from values, and reads no hints.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from xla_replica.common.compiling import compiled


@compiled
def array_at(address, shape, like):
    """Returns the contiguous array at an address, of the dtype of ``like``."""
    return numba.carray(_pointer(address), shape, like.dtype)


@compiled
def integers_at(address, shape):
    """Returns the contiguous int64 array at an address."""
    return numba.carray(_pointer(address), shape, np.int64)


@intrinsic
def _pointer(typing_context, address):
    del typing_context

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate
