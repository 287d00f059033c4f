"""Selecting the largest numbers of a row, by a count that is on the device."""

from __future__ import annotations

import operator
from typing import Any

import torch

from xla_replica.device.device_traits import traits
from xla_replica.device.lazy_operations import lazy_operation


def kth_largest(values_LN: torch.Tensor, counts_L1: torch.Tensor) -> torch.Tensor:
    """Returns ``(L, 1)``: the ``counts_L1[l]``-th largest number of a row.

    A changed count compiles nothing. On a lazy device it is found bit by bit, in 32
    passes over the row: the TPU's compiler takes 3.5 s for a program that sorts 2^18
    numbers, and 0.8 s for this loop. On a CPU, where a count can be read, the number of
    a single row is found faster than the row is sorted.

    Args:
        values_LN: Without NaN; float64 is sorted on every device.
        counts_L1: Integers from 1 to N. The result for 0 means nothing.
    """
    if traits(values_LN).is_lazy and values_LN.dtype != torch.float64:
        is_float = values_LN.is_floating_point()
        values = values_LN.float() if is_float else values_LN.to(torch.int32)
        found = _kth_largest(values, counts_L1.to(torch.int32), is_float=is_float)
        return found.to(values_LN.dtype)
    if traits(values_LN).is_host and len(values_LN) == 1:
        place = values_LN.shape[1] + 1 - max(int(counts_L1), 1)
        return values_LN.kthvalue(place, keepdim=True).values
    sorted_LN = torch.sort(values_LN, dim=1, descending=True).values
    return sorted_LN.gather(1, (counts_L1.to(torch.int64) - 1).clamp(min=0))


def first(mask_LN: torch.Tensor, counts_L1: torch.Tensor) -> torch.Tensor:
    """Returns bool ``(L, N)``: the first ``counts_L1[l]`` of a row's True ones.

    On a lazy device without a prefix sum, for which the TPU's compiler takes 8 s.

    Args:
        mask_LN: Bool.
        counts_L1: Integers from 0 on.
    """
    if not traits(mask_LN).is_lazy:
        return mask_LN & (mask_LN.cumsum(1, dtype=torch.int32) <= counts_L1)
    size = mask_LN.shape[1]
    from_end_N = torch.arange(size, 0, -1, dtype=torch.int32, device=mask_LN.device)
    places_LN = torch.where(mask_LN, from_end_N, torch.zeros_like(from_end_N))
    last_L1 = kth_largest(places_LN, counts_L1)
    return mask_LN & (places_LN >= last_L1) & (counts_L1 > 0)


@lazy_operation
def _kth_largest(values_LN: Any, counts_L1: Any, is_float: bool) -> Any:
    """Builds `kth_largest` of float32 or int32: a loop over the bits of the result."""
    make, integer, unsigned = type(values_LN), "s32", "u32"
    builder = values_LN.builder()
    num_rows, size = values_LN.shape().sizes

    def in_order(bits: Any) -> Any:
        """Integers in the order of the floats whose bits they are; its own inverse."""
        flipped = bits ^ bits.scalar_like(0x7FFFFFFF)
        return (bits < bits.zeros_like()).select(flipped, bits)

    def is_left(bit: Any, *rest: Any) -> Any:
        return bit != make.scalar(bit.builder(), 0, integer)

    def step(bit: Any, found: Any, keys: Any, counts: Any) -> tuple[Any, ...]:
        """Sets a bit if as many keys as wanted reach what that gives."""
        candidate = found + bit.broadcast((num_rows, 1))
        of_rows = candidate.reshape((num_rows,))
        reached = keys >= of_rows.broadcast_in_dim((num_rows, size), (0,))
        zero = make.scalar(bit.builder(), 0, integer)
        num_reached = reached.cast(integer).reduce(zero, operator.add, (1,))
        enough = num_reached.reshape((num_rows, 1)) >= counts
        # Halved as an unsigned number, from the highest bit down to none.
        two = make.scalar(bit.builder(), 2, integer).bitcast(unsigned)
        half = (bit.bitcast(unsigned) / two).bitcast(integer)
        return half, enough.select(candidate, found), keys, counts

    keys = in_order(values_LN.bitcast(integer)) if is_float else values_LN
    lowest = make.scalar(builder, -(2**31), integer)
    state = (lowest, lowest.broadcast((num_rows, 1)), keys, counts_L1)
    found = make.mkwhile(state, is_left, step).get_tuple_element(1)
    return in_order(found).bitcast("f32") if is_float else found
