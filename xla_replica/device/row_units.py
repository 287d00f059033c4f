"""Integers that add up to the same bits on any number of replicas.

A sum of floats depends on the order of its terms, and so on how many replicas make it;
a sum of integers does not. So the tensors of every minibatch are rounded to multiples
of a power of two, the unit of each of their rows, and int32 multiples are added.

A row is an index of a tensor's first dimension; a vector has one. Its unit follows from
the largest number that it had in a minibatch of earlier steps, its peak, which sinks by
a bit in eight steps. A step of n minibatches has 31 bits less those of n. Numbers of
the size of their row's peak have 22 of them or more, and one to five are for rows that
grow. Beyond 255 minibatches the sums of a replica carry into a second int32. A step in
which a row has grown more, or all rows of a tensor have fallen far, is run again with
its own peaks (`RowUnits.measure` says so).

A few numbers, whose size nothing tells, are digits in base 2^16 instead (`SmallSum`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from xla_replica.common.trees import NamedTensors, Tensors
from xla_replica.device.comparisons import comparable, where_finite

if TYPE_CHECKING:
    from xla_replica.backends.replica import Replica

# Bits that a number of the size of its row's peak has at least.
LEAST_BITS = 22
# The peak of a row counts as at least a quarter of its tensor's, so that a rare row,
# such as one of an embedding, can come back.
FLOOR = 2.0**-2
# By what a peak sinks in a step, and what is left of one that fell too far.
SINK, FALLEN = 2.0**-0.125, 2.0**-6
MOST_NARROW, MOST_MINIBATCHES = 2 ** (31 - LEAST_BITS - 1) - 1, 2**14
# Below 2^-81 the unit would be no normal number; such numbers may become zero.
_MOST_UP = 2.0 ** (LEAST_BITS - 1 + 81)
_CARRY_BITS = 16
# A CPU's caches hold so many numbers with their multiples.
_CACHED = 2**16
_LIMB_BITS = 16
# Of the limbs, from the lowest: all normal numbers of float32 are their multiples, as
# far as they have any digits there.
_EXPONENTS = range(-126, 128, _LIMB_BITS)


class RowUnits:
    """The units of the rows of named tensors, and their largest numbers in this step.

    Args:
        replica: The replica whose tensors these are.

    Attributes:
        rows: Each tensor's rows among those of all, by its name.
        is_wide: Whether sums of the step under way carry into a second int32.
        up: ``(rows, 1)``: what tensors are multiplied by; not on a lazy device.
        seen: ``(rows,)``: the largest number of a minibatch of the step.
        is_bad: ``(rows,)``: whether one was not finite; known after `measure`.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.is_lazy, self.is_host = replica.is_lazy, replica.is_host
        self.rows: dict[str, slice] = {}
        self.is_wide = self.stays_wide = False
        # As `seen`, of this minibatch alone; on a lazy device.
        self.found: dict[str, torch.Tensor] = {}
        self._peak: torch.Tensor
        self._base: torch.Tensor
        self._bits = 0
        self._saved: NamedTensors = {}
        self.extend({})

    def extend(self, tensors: NamedTensors) -> None:
        """Appends those tensors that are new, without a peak."""
        saved = self.state_dict()
        end = max((rows.stop for rows in self.rows.values()), default=0)
        for name, tensor in tensors.items():
            if name not in self.rows:
                self.rows[name] = slice(end, end := end + num_rows(tensor))
        sizes = [rows.stop - rows.start for rows in self.rows.values()]
        owner = torch.arange(len(sizes), dtype=torch.int32)
        owner = owner.repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        self._sizes, self._owner = sizes, self.replica.send(owner)
        self.seen = torch.zeros(end).to(self.replica.device)
        if not self.is_lazy:
            self.up = torch.ones_like(self.seen).unsqueeze(1)
        self.load_state_dict({**self._saved, **saved})

    def begin(self, num_minibatches: int) -> None:
        """Sets the units of a step of so many minibatches, of all replicas."""
        self.is_wide = self.stays_wide or num_minibatches > MOST_NARROW
        # Where a sum carries, as many as for seven minibatches.
        bits = 28 if self.is_wide else 31 - num_minibatches.bit_length()
        if bits != self._bits:
            more, self._bits = bits - LEAST_BITS, bits
            growth = min(more, (more + 1) // 2 + 1)
            numbers = 2.0 ** (more - growth), 2.0 ** (LEAST_BITS + growth)
            self._scale, self._limit = map(self.replica.scalar, numbers)
        if not self.is_lazy:
            torch.mul(self._base, self._scale, out=self.up)

    def up_of(self, rows: slice) -> torch.Tensor:
        """Returns ``(r, 1)``: what some rows are multiplied by."""
        return self._base[rows] * self._scale if self.is_lazy else self.up[rows]

    def rounded(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Returns a minibatch's tensor in multiples of its rows' units, of its dtype.

        Takes in its largest numbers. bfloat16 and wider dtypes hold the multiples, as
        these have no more digits than the numbers. Not on a lazy device.
        """
        result = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if value.numel():
            value = value.detach().float().reshape(num_rows(value), -1)
            pieces = self.targets(self.rows[name], result.view(value.shape))
            for multiples, scaled in self.scaled(value, pieces):
                multiples.copy_(scaled)
        return result

    def targets(self, rows: slice, target: torch.Tensor) -> list[Tensors]:
        """Returns a target by some rows each, with their units and largest numbers."""
        return [*self.pieces(target, self.up[rows], self.seen[rows])]

    def scaled(
        self, value: torch.Tensor, targets: list[Tensors]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields targets, and those rows of a value in multiples of their units.

        Takes in its largest numbers.
        """
        parts = value.split(len(targets[0][0])) if len(targets) > 1 else [value]
        for part, (into, up, seen) in zip(parts, targets):
            if self.is_host:  # where the norm is slow
                scaled = part.abs()
                largest = scaled.amax(1)
            else:
                scaled, largest = None, torch.linalg.vector_norm(part, math.inf, 1)
            torch.maximum(seen, largest, out=seen)
            yield into, torch.mul(part, up, out=scaled).round_()

    def pieces(self, *by_row: torch.Tensor) -> Iterable[Tensors]:
        """Returns tensors by some rows each, of the first what a CPU's caches hold."""
        first = by_row[0]
        if not self.is_host or first.numel() <= _CACHED:
            return [by_row]
        num_rows = max(1, _CACHED // first.shape[1])
        return zip(*(each.split(num_rows) for each in by_row))

    def end_minibatch(self) -> None:
        """Takes in, on a lazy device, the largest numbers of a minibatch."""
        if self.found:
            nothing = torch.zeros_like(self.seen)
            new = [self.found.get(n, nothing[rows]) for n, rows in self.rows.items()]
            self.seen, self.found = torch.maximum(self.seen, torch.cat(new)), {}

    def measure(self) -> torch.Tensor:
        """Looks at the largest numbers of all replicas. Collective.

        Returns:
            ``(1,)``: whether the step must be run again, with its own peaks, which
            `follow` takes.
        """
        seen = self.seen if self.is_lazy else self.seen.nan_to_num(math.inf, math.inf)
        seen = self.replica.all_max(seen)
        self.is_bad = ~where_finite(seen)
        seen = torch.where(self.is_bad, torch.zeros_like(seen), seen)
        both = torch.stack([seen, self._peak])
        of_tensors = [rows.amax(1) for rows in both.split(self._sizes, 1)]
        tops, old_tops = torch.stack(of_tensors, 1)
        counts = tops > comparable(0.0, tops)
        has_grown = (seen * self._base.squeeze(1) >= self._limit).any()
        has_fallen = (counts & (tops < old_tops * FALLEN)).any()
        again: torch.Tensor = has_grown | has_fallen
        kept, kept_tops = (
            torch.where(again, torch.zeros_like(each), each * SINK)
            for each in (self._peak, old_tops)
        )
        floor = torch.maximum(tops, kept_tops) * FLOOR
        floor, counts = (each.index_select(0, self._owner) for each in (floor, counts))
        new = torch.maximum(torch.maximum(seen, kept), floor)
        self._next_peak = torch.where(counts & ~self.is_bad, new, self._peak)
        return again.reshape(1)

    def divisors(self, count: Any = 1) -> torch.Tensor:
        """Returns ``(rows, 1)``: what makes sums means; call it after `measure`.

        They are NaN where the row of a minibatch was not finite.

        Args:
            count: Of how many it is the mean, a number or ``(1,)``.
        """
        up = self.up_of(slice(None)) * count
        return torch.where(self.is_bad.unsqueeze(1), torch.full_like(up, math.nan), up)

    def total(self, name: str, like: torch.Tensor) -> RowTotal:
        """Returns a sum of tensors of this name, of the shape of ``like``."""
        shape = num_rows(like), like.numel() // num_rows(like)
        # No view, since torch_xla sums views apart from what they show.
        zeros = torch.zeros(shape, dtype=torch.int32, device=self.replica.device)
        return RowTotal(self, name, zeros)

    def follow(self) -> None:
        """Takes the peaks that `measure` has found, and forgets the step."""
        self._peak = self._next_peak
        up = torch.full_like(self._peak, _MOST_UP)
        for bits in (64, 64, 64, 32, 16, 8, 4, 2, 1):  # powers of two alone: exact
            size = self._peak * up
            is_least = size < comparable(2.0 ** (LEAST_BITS - 1 + bits), size)
            up = torch.where(is_least, up, up * 2.0**-bits)
        self._base = up.unsqueeze(1)
        self.drop_step()

    def drop_step(self) -> None:
        """Forgets the largest numbers of the step."""
        self.found = {}
        # In its memory, unless a lazy device would have to keep what it was.
        self.seen = torch.zeros_like(self.seen) if self.is_lazy else self.seen.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the peaks of every tensor's rows, by its name."""
        if not self.rows:
            return {}
        [peak] = self.replica.fetch([self._peak])
        return {name: peak[rows].clone() for name, rows in self.rows.items()}

    def load_state_dict(self, state: NamedTensors) -> None:
        """Takes what `state_dict` has returned; other tensors have no peaks.

        Names that are not known yet may be appended later.
        """
        self._saved, peak = state, torch.zeros(len(self.seen))
        for name, rows in self.rows.items():
            if name in state:
                peak[rows] = state[name]
        self._next_peak = self.replica.send(peak)
        self.follow()


def num_rows(tensor: torch.Tensor) -> int:
    """Returns how many rows a tensor has: of a vector, a scalar and of nothing, one."""
    return tensor.shape[0] if tensor.dim() > 1 and tensor.numel() else 1


class RowTotal:
    """The sum of a tensor over the minibatches of a step, in units of its rows.

    Args:
        units: Its rows are among these.
        name: The tensor's there.
        low: ``(rows, numbers of each)``: memory for the sum, of int32.

    Attributes:
        is_stale: Whether what is added next replaces what is there.
    """

    def __init__(self, units: RowUnits, name: str, low: torch.Tensor) -> None:
        self._units, self._name, self._rows = units, name, units.rows[name]
        self._low, self.is_stale = low, False
        # What is added to, by some rows each, and the units that these have.
        self._targets = list[Tensors]()
        self._up: torch.Tensor | None = None
        self._high: torch.Tensor | None = None  # what it carries in a step that is wide

    def use(self, memory: torch.Tensor) -> None:
        """Makes ``(n,)`` int32 the memory of the sum."""
        self._low = memory.view(self._low.shape)
        self._up = None

    @property
    def parts(self) -> list[torch.Tensor]:
        """What replicas sum, in place."""
        if not self._units.is_wide:
            return [self._low]
        if self._high is None:
            self._high = torch.zeros_like(self._low)
        return [self._low, self._high]

    def add_(self, value: torch.Tensor | None) -> None:
        """Adds a minibatch's tensor, of a dtype of at most 32 bits.

        None counts as zeros, which a lazy device adds: a program with another sequence
        of its tensors would be another program.
        """
        units = self._units
        if not self._low.numel():
            return
        if value is None:
            if not units.is_lazy:
                return
            value = torch.zeros_like(self._low, dtype=torch.float32)
        value = (value.to_dense() if value.is_sparse else value).detach().float()
        value = value.reshape(self._low.shape)
        if units.is_lazy:
            self._low.add_(torch.round(value * units.up_of(self._rows)).int())
            infinite = value.new_full((), math.inf)  # not float64, as a number would be
            sizes = torch.where(where_finite(value), value.abs(), infinite)
            units.found[self._name] = sizes.amax(1)
        else:
            self._add_pieces_(value)
        if units.is_wide:
            low, high = self.parts
            carry = low >> _CARRY_BITS
            high.add_(carry)
            low.sub_(carry << _CARRY_BITS)

    def _add_pieces_(self, value: torch.Tensor) -> None:
        units = self._units
        is_stale, self.is_stale = self.is_stale, False
        if is_stale and units.is_wide:
            self.parts[1].zero_()
        if self._up is not units.up:
            self._targets, self._up = units.targets(self._rows, self._low), units.up
        for total, scaled in units.scaled(value, self._targets):
            if is_stale:
                total.copy_(scaled)
            else:
                total.add_(scaled.int())

    def mean_into_(self, result: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
        """Makes ``result`` the mean that the divisors are for, and returns it.

        It may have the memory of the sum, which is then gone.
        """
        low, by_row = self._low, divisors[self._rows]
        if self._units.is_wide:
            low, high = self.parts
            carry = (low + 2 ** (_CARRY_BITS - 1)) >> _CARRY_BITS
            low, high = low - (carry << _CARRY_BITS), high + carry
            # The same float, however replicas had carried; its last addition rounds.
            low = high.float() * 2.0**_CARRY_BITS + low.float()
        if self._units.is_lazy or not result.is_contiguous():
            return result.copy_((low.float() / by_row).view(result.shape))
        parts = self._units.pieces(low, result.view(low.shape), by_row)
        for part, mean, divisor in parts:
            # To divide integers takes a CPU twice as long as to convert them first.
            part = part.float() if self._units.is_host else part
            torch.div(part, divisor, out=mean)
        return result

    def zero_(self) -> None:
        """Makes the sum zero."""
        for part in self.parts:
            part.zero_()
        self.is_stale = False


class SmallSum:
    """Adds a few numbers, such as the squares of a step's gradients.

    An exact one adds the digits of float32 numbers in base 2^16, as int32, so that the
    sum has the same bits whatever the order: at most 2^14 numbers are added.

    Args:
        size, dtype: How many numbers, and theirs.
        replica: The replica that adds them.
        is_exact: Whether sums do not depend on their order; needs float32.

    Attributes:
        total: What replicas sum, in place.
    """

    def __init__(
        self, size: int, dtype: torch.dtype, replica: Replica, is_exact: bool = False
    ) -> None:
        self._dtype = dtype
        same = torch.Tensor.detach
        self._encode, self._decode = (digits_of, value_of) if is_exact else (same, same)
        self.total = self._encode(torch.zeros(size, dtype=dtype, device=replica.device))

    def add(self, numbers: torch.Tensor) -> None:
        """Adds a minibatch's numbers, ``(size,)``."""
        self.total = self.total + self._encode(numbers)

    def spoil(self) -> None:
        """Makes the sum not finite, on every replica."""
        size = self.total.shape[-1]
        self.add(self.total.new_full((size,), math.nan, dtype=self._dtype))

    def value(self) -> torch.Tensor:
        """Returns the sum, ``(size,)``."""
        return self._decode(self.total).to(self._dtype)

    def grow(self, num_new: int) -> None:
        """Appends numbers whose sum is zero."""
        new = self.total.new_zeros((*self.total.shape[:-1], num_new))
        self.total = torch.cat([self.total, new], -1)


def digits_of(numbers: torch.Tensor) -> torch.Tensor:
    """Returns float32 numbers, ``(n,)``, as int32 digits, ``(limbs + 1, n)``."""
    is_bad = ~where_finite(numbers)
    rest = torch.where(is_bad, torch.zeros_like(numbers), numbers)
    digits = []
    for exponent in reversed(_EXPONENTS):  # no operation rounds
        digit = torch.trunc(rest * 2.0**-exponent)
        rest = rest - digit * 2.0**exponent
        digits.append(digit)
    return torch.stack([*digits[::-1], is_bad.to(numbers.dtype)]).to(torch.int32)


def value_of(digits: torch.Tensor) -> torch.Tensor:
    """Returns what digits, or sums of them, amount to: ``(n,)`` float32."""
    value = torch.zeros_like(digits[0], dtype=torch.float32)
    for exponent, digit in zip(_EXPONENTS, digits):
        value = value + digit.float() * 2.0**exponent
    return torch.where(digits[-1] > 0, math.nan, value)


class Rider:
    """Per-minibatch state that is committed or discarded with its step.

    Of what an optimizer tells whose steps may be run again, it does what concerns it.
    """

    def end_minibatch(self, counts: bool = True) -> None:
        """Adds what a minibatch has left to the step's, unless it is padding."""

    def tensors(self) -> list[torch.Tensor]:
        """Returns what replicas sum, the same in every step that is alike."""
        return []

    def exchange(self, step: Any) -> None:
        """Gathers what no sum can hold, once a step's sums are there. Collective."""

    def commit(self, num_minibatches: Any) -> None:
        """Uses the sums over all replicas, right before the weights change."""

    def clear(self) -> None:
        """Forgets the step's minibatches, and one that did not end."""


class FloatUnits:
    """What `RowUnits` are where sums are of floats, which need no units."""

    def __init__(self, replica: Replica) -> None:
        self._is_lazy = replica.is_lazy

    def extend(self, tensors: NamedTensors) -> None:
        """Takes named tensors, of which it needs nothing."""

    def divisors(self, count: Any = 1) -> Any:
        """Returns what makes any sum a mean."""
        return count.reshape(()) if isinstance(count, torch.Tensor) else count

    def total(self, name: str, like: torch.Tensor) -> FloatTotal:
        """Returns a sum of tensors of the shape and device of ``like``."""
        return FloatTotal(like, self._is_lazy)


class FloatTotal:
    """What a `RowTotal` is where sums are of floats, of 32 bits or more."""

    def __init__(self, like: torch.Tensor, is_lazy: bool) -> None:
        self._is_lazy = is_lazy
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.parts = [torch.zeros_like(like.detach(), dtype=dtype)]

    def add_(self, value: torch.Tensor | None) -> None:
        """Adds a minibatch's tensor; None counts as zeros, see `RowTotal.add_`."""
        if value is not None:
            self.parts[0].add_(value.to_dense() if value.is_sparse else value)
        elif self._is_lazy:
            self.parts[0].add_(torch.zeros_like(self.parts[0]))

    def mean_into_(self, result: torch.Tensor, divisors: Any) -> torch.Tensor:
        """Makes ``result`` the mean, see `RowTotal.mean_into_`, and returns it."""
        return result.copy_(self.parts[0] / divisors)


Total = RowTotal | FloatTotal
