"""Copies of rows in another layout, which a TPU's compiler would unroll.

A reshape or a transpose of a step's gradients becomes up to a million instructions
there, which take up to 18 s to compile, and twice that where two matrix products each
make the copy on their own. A loop takes 0.1 s. Its body copies some rows at a time.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from xla_replica import lazy_operation, traits

# The most rows that the body of a loop joins.
_AT_ONCE = 16


def flattened(values: Tensor) -> Tensor:
    """Returns values ``(B, ...)`` as ``(B, numel)``."""
    if values.dim() == 1:
        return values.unsqueeze(1)
    if values.dim() == 3 and values.shape[1] > _AT_ONCE and traits(values).is_lazy:
        at_once = math.gcd(values.shape[1], _AT_ONCE)
        return _one_after_another(values, axis=1, at_once=at_once)
    return values.flatten(1)


def interleaved(values_WBD: Tensor) -> Tensor:
    """Returns ``(B W, D)``: the first row of every w, then the second rows."""
    if values_WBD.shape[0] == 1:
        return values_WBD[0]
    if traits(values_WBD).is_lazy:
        return _one_after_another(values_WBD, axis=0, at_once=1)
    return values_WBD.transpose(0, 1).flatten(0, 1)


@lazy_operation
def _one_after_another(values_ANB: Any, *, axis: int, at_once: int) -> Any:
    """Builds ``values`` as ``(A, N B)`` or, along axis 0, as ``(N A, B)``.

    It is a loop over ``at_once`` of N, which puts one part after the other.
    """
    make, (size, num_rows, length) = type(values_ANB), values_ANB.shape().sizes
    step = (size, length)[axis]
    shape = (num_rows * size, length) if axis == 0 else (size, num_rows * length)

    def is_left(row: Any, *rest: Any) -> Any:
        return row < _integer(row, num_rows)

    def copy(row: Any, found: Any, values: Any) -> tuple[Any, ...]:
        place = [_integer(row, 0), _integer(row, 0)]
        place[axis] = row * _integer(row, step)
        first = (_integer(row, 0), row, _integer(row, 0))
        part = values.dynamic_slice(first, (size, at_once, length))
        part = part.reshape((size, at_once * length))
        found = found.dynamic_update_slice(part, tuple(place))
        return row + _integer(row, at_once), found, values

    zero = make.scalar(values_ANB.builder(), 0, values_ANB.shape().dtype)
    state = (_integer(values_ANB, 0), zero.broadcast(shape), values_ANB)
    return make.mkwhile(state, is_left, copy).get_tuple_element(1)


def _integer(beside: Any, value: int) -> Any:
    return type(beside).scalar(beside.builder(), value, "s32")
