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
        return _flattened(values, at_once=math.gcd(values.shape[1], _AT_ONCE))
    return values.flatten(1)


def interleaved(values_WBD: Tensor) -> Tensor:
    """Returns ``(B W, D)``: the first row of every w, then the second rows."""
    if values_WBD.shape[0] == 1:
        return values_WBD[0]
    if traits(values_WBD).is_lazy:
        return _interleaved(values_WBD)
    return values_WBD.transpose(0, 1).flatten(0, 1)


@lazy_operation
def _flattened(values_BPQ: Any, *, at_once: int) -> Any:
    """Builds ``values.flatten(1)`` as a loop over ``at_once`` of P rows."""
    size, num_rows, length = values_BPQ.shape().sizes

    def copy(row: Any, found: Any, values: Any) -> Any:
        zero = _integer(row, 0)
        part = values.dynamic_slice((zero, row, zero), (size, at_once, length))
        part = part.reshape((size, at_once * length))
        return found.dynamic_update_slice(part, (zero, row * _integer(row, length)))

    return _loop(values_BPQ, (size, num_rows * length), num_rows, at_once, copy)


@lazy_operation
def _interleaved(values_WBD: Any) -> Any:
    """Builds ``values.transpose(0, 1).flatten(0, 1)`` as a loop over B."""
    num_parts, num_rows, length = values_WBD.shape().sizes

    def copy(row: Any, found: Any, values: Any) -> Any:
        zero = _integer(row, 0)
        part = values.dynamic_slice((zero, row, zero), (num_parts, 1, length))
        part = part.reshape((num_parts, length))
        return found.dynamic_update_slice(part, (row * _integer(row, num_parts), zero))

    return _loop(values_WBD, (num_rows * num_parts, length), num_rows, 1, copy)


def _loop(
    values: Any, shape: tuple[int, ...], num_rows: int, at_once: int, copy: Any
) -> Any:
    """Returns what ``copy(row, found, values)`` makes of zeros, row after row."""
    make = type(values)

    def is_left(row: Any, *rest: Any) -> Any:
        return row < _integer(row, num_rows)

    def step(row: Any, found: Any, values: Any) -> tuple[Any, ...]:
        return row + _integer(row, at_once), copy(row, found, values), values

    zero = make.scalar(values.builder(), 0, values.shape().dtype)
    state = (_integer(values, 0), zero.broadcast(shape), values)
    return make.mkwhile(state, is_left, step).get_tuple_element(1)


def _integer(beside: Any, value: int) -> Any:
    return type(beside).scalar(beside.builder(), value, "s32")
