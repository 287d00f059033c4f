"""Sums with the same bits on any number of replicas: numbers become integers.

A sum of floats depends on the order of its terms, and so on how many replicas make it;
a sum of integers does not. So the tensors of every minibatch are rounded to multiples
of a small power of two, their unit, and the multiples are added.

A tensor's unit follows from the last step: if all numbers that any minibatch had then
were below 2^e, the unit is 2^(e-40), and numbers below 2^(e+4) fit. A step whose
largest number is beyond that, or below 2^(e-14), is run again with the units of its own
maxima (`Grid.measure` says so), hence rounding moves no number of a minibatch, nor the
mean over minibatches, by more than 2^-27 of the largest number of the step.

Units are those of all devices. Where floats of 64 bits are native a tensor's sum is one
of those, which holds integers below 2^53 exactly. TPUs add two int32 limbs, the high
one in units of 2^(e-20), the low one in those of 2^(e-40); they are computed from
float32 by operations that do not round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xla_replica.backends.gradient_sum import GradientSum
from xla_replica.device.comparisons import comparable, where_finite
from xla_replica.device.device_traits import traits

if TYPE_CHECKING:
    from xla_replica.backends.replica import Replica

LOW_BITS = 20
HIGH_BITS = 20
# How far the maxima of a step may lie from those of the last one, as powers of two.
UP, DOWN = 4, 13
# Below it float32 has no normal numbers for the unit. So denormal numbers, which some
# devices take for zero, round to zero everywhere.
LEAST_EXPONENT = -80
# A tensor's level is its exponent e plus this; 0 is that of one without a grid.
_BIAS = 126
# A CPU's caches hold so many numbers with their multiples.
_BLOCK = 2**16


class Grid:
    """The units of named tensors, and the largest numbers of the step under way.

    Args:
        names: Of the tensors.
        replica: The replica whose tensors these are.

    Attributes:
        rows: The place of each tensor, by its name.
        max_terms: How many minibatches a sum can have.
        up: By row: a power of two, what tensors are multiplied by.
        seen: By row: the largest number of a minibatch, infinite if one is not finite.
        is_bad: By row: whether one of the step is not; known after `measure`.
    """

    def __init__(self, names: Sequence[str], replica: Replica) -> None:
        self.rows: dict[str, int] = {}
        self.replica, self.is_wide = replica, traits(replica.device).has_float64
        self.is_host, self.is_lazy = replica.is_host, replica.is_lazy
        self._bits = HIGH_BITS + LOW_BITS if self.is_wide else HIGH_BITS
        self.max_terms = 2 ** ((53 if self.is_wide else 31) - self._bits - UP) - 1
        # A table, and not exp2, which is not exact on every device.
        powers = torch.exp2(torch.arange(-_BIAS, 128, dtype=torch.float64)).float()
        self._powers = powers.to(replica.device)
        zero = torch.zeros((), dtype=torch.float32)
        self._zero = 0.0 if self.is_host else zero.to(replica.device)
        self._saved: Mapping[str, int] = {}
        self.extend(names)

    def extend(self, names: Sequence[str]) -> None:
        """Appends those tensors that are new, without a grid."""
        if self.rows and self._largest is not self._nothing:
            raise ValueError(
                f"{[*names][:1]} cannot be summed from the middle of a step on: build "
                "what asks for it between two updates"
            )
        saved = self.state_dict() if self.rows else {}
        for name in names:
            self.rows.setdefault(name, len(self.rows))
        self._nothing = torch.zeros(len(self.rows)).float().to(self.replica.device)
        self.load_state_dict({**self._saved, **saved})

    def end_minibatch(self) -> None:
        """Notes the largest numbers of the tensors that were added."""
        found = [self.seen.get(row, self._zero) for row in range(len(self.rows))]
        if self.seen:
            new = torch.tensor(found).float() if self.is_host else torch.stack(found)
            if not self.is_lazy:
                new = new.nan_to_num(math.inf, math.inf)
            self._largest = torch.maximum(self._largest, new)
        self.seen: dict[int, Any] = {}

    def measure(self) -> torch.Tensor:
        """Looks at the largest numbers of all replicas. Collective.

        Returns:
            ``(1,)``: whether the step must be run again, with the units of its maxima,
            which `follow` takes.
        """
        largest = self.replica.all_max(self._largest)
        level = (self._powers <= largest[:, None]).sum(1, dtype=torch.int32)
        level = level.clamp(min=LEAST_EXPONENT + _BIAS)
        self.is_bad = ~where_finite(largest)
        counts = ~self.is_bad & (largest > comparable(0.0, largest))
        moved = level - self._level
        is_beyond = (moved > UP) | (moved < -DOWN) | (self._level == 0)
        self._next_level = torch.where(counts, level, self._level)
        return (counts & is_beyond).any().reshape(1)

    def divisors(self, count: Any = 1) -> Any:
        """Returns by row what makes a sum a mean; call it after `measure`.

        They are NaN where the tensor of a minibatch was not finite, and computed for
        all rows at once, since an accelerator begins each operation anew.

        Args:
            count: Of how many it is the mean, a number or ``(1,)``.
        """
        if self.is_host:
            pairs = zip(self.up, self.is_bad.tolist())
            return [math.nan if bad else up * count for up, bad in pairs]
        nan = self.up.new_full((), math.nan)
        return torch.where(self.is_bad, nan, self.up * count)

    def total(self, name: str, like: torch.Tensor) -> Total:
        """Returns a sum of tensors of this name, of the shape of ``like``."""
        return Total(self, name, like)

    def follow(self) -> None:
        """Takes the units that `measure` has found, and forgets the step."""
        self._level = self._next_level
        level = self._level.clamp(min=LEAST_EXPONENT + _BIAS)
        up = self._powers.index_select(0, self._bits + 2 * _BIAS - level)
        self.up = up.tolist() if self.is_host else up
        self.drop_step()

    def drop_step(self) -> None:
        """Forgets the largest numbers of the step."""
        self.seen: dict[int, Any] = {}
        self._largest = self._nothing

    def state_dict(self) -> dict[str, int]:
        """Returns the exponents of the tensors that have one, by name."""
        [level] = self.replica.fetch([self._level])
        return {name: e - _BIAS for name, e in zip(self.rows, level.tolist()) if e}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes what `state_dict` has returned; other tensors have no exponent.

        Names that are not known yet may be appended later.
        """
        self._saved = state
        level = [state.get(name, -_BIAS) + _BIAS for name in self.rows]
        self._next_level = self.replica.send(torch.tensor(level, dtype=torch.int32))
        self.follow()


class Total:
    """The sum of a tensor over the minibatches of a step, in units of its grid.

    Args:
        grid, name: The grid, and the tensor's name there.
        like: A tensor of its shape and device.

    Attributes:
        parts: What replicas sum, in place.
    """

    def __init__(self, grid: Grid, name: str, like: torch.Tensor) -> None:
        self._grid, self._row = grid, grid.rows[name]
        dtypes = [torch.float64] if grid.is_wide else [torch.int32] * 2
        self.parts = [torch.zeros_like(like.detach(), dtype=each) for each in dtypes]

    def add_(self, value: torch.Tensor | None) -> None:
        """Adds a minibatch's tensor, of a dtype of at most 32 bits.

        None counts as zeros, which a lazy device adds: a program with another sequence
        of its tensors would be another program.
        """
        grid, up = self._grid, self._grid.up[self._row]
        if value is None:
            if not grid.is_lazy:
                return
            value = torch.zeros_like(self.parts[0], dtype=torch.float32)
        value = (value.to_dense() if value.is_sparse else value).float()
        if not value.numel():
            return
        if grid.is_host:
            grid.seen[self._row] = _add_blocks_(self.parts[0], value, up)
            return
        high, *limbs = self.parts
        scaled = value * up  # exact, as all but `round` is
        whole = torch.round(scaled)
        high.add_(whole if grid.is_wide else whole.to(high.dtype))
        for low in limbs:
            low.add_(torch.round((scaled - whole) * 2.0**LOW_BITS).to(low.dtype))
        if grid.is_lazy:
            infinite = value.new_full((), math.inf)  # not float64, as a number would be
            sizes = torch.where(where_finite(value), value.abs(), infinite)
            grid.seen[self._row] = sizes.max()
        else:  # one operation, of which `Grid.end_minibatch` makes NaN infinite
            grid.seen[self._row] = torch.linalg.vector_norm(value, math.inf)

    def mean_into_(self, result: torch.Tensor, divisors: Any) -> torch.Tensor:
        """Makes ``result`` the mean that `Grid.divisors` are for, and returns it."""
        grid, number = self._grid, divisors[self._row]
        if not grid.is_wide:
            return result.copy_(_value_of_limbs(*self.parts) / number)
        whole = self.parts[0], result
        for total, part in _blocks(*whole) if grid.is_host else [whole]:
            torch.div(total, number, out=part)
        return result

    def zero_(self) -> None:
        """Makes the sum zero."""
        for part in self.parts:
            part.zero_()


class FloatGrid:
    """What a `Grid` is where sums are of floats, which need no units."""

    def __init__(self, replica: Replica) -> None:
        self.is_lazy = replica.is_lazy

    def extend(self, names: Sequence[str]) -> None:
        """Takes names of tensors, of which it needs none."""

    def divisors(self, count: Any = 1) -> Any:
        """Returns what makes any sum a mean."""
        return count.reshape(()) if isinstance(count, torch.Tensor) else count

    def total(self, name: str, like: torch.Tensor) -> FloatTotal:
        """Returns a sum of tensors of the shape and device of ``like``."""
        del name
        return FloatTotal(self, like)


class FloatTotal:
    """What a `Total` is where sums are of floats, of 32 bits or more."""

    def __init__(self, grid: FloatGrid, like: torch.Tensor) -> None:
        self._is_lazy = grid.is_lazy
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.parts = [torch.zeros_like(like.detach(), dtype=dtype)]

    def add_(self, value: torch.Tensor | None) -> None:
        """Adds a minibatch's tensor; None counts as zeros, see `Total.add_`."""
        if value is not None:
            self.parts[0].add_(value.to_dense() if value.is_sparse else value)
        elif self._is_lazy:
            self.parts[0].add_(torch.zeros_like(self.parts[0]))

    def mean_into_(self, result: torch.Tensor, divisors: Any) -> torch.Tensor:
        """Makes ``result`` the mean, see `Total.mean_into_`, and returns it."""
        return result.copy_(self.parts[0] / divisors)

    def zero_(self) -> None:
        """Makes the sum zero."""
        self.parts[0].zero_()


class Rider:
    """What else of a step's minibatches counts if the step is made, and not otherwise.

    Of what an optimizer tells whose steps may be run again, it does what concerns it.

    Attributes:
        totals: What replicas sum, the same of them in every step that is alike.
    """

    totals: Sequence[Total | FloatTotal] = ()

    def end_minibatch(self) -> None:
        """Adds what a minibatch has left to `totals`."""

    def exchange(self, step: Any) -> None:
        """Gathers what no sum can hold, once a step's sums are there. Collective."""

    def commit(self, num_minibatches: Any) -> None:
        """Uses the sums over all replicas, right before the weights change."""

    def clear(self) -> None:
        """Forgets a minibatch that did not end, once the totals are zero."""


class ExactSum(GradientSum):
    """Adds the gradients of every minibatch as integers on a grid.

    Between two minibatches ``.grad`` is None, and after a backward pass it is the
    gradient of that minibatch alone.

    Args:
        replica, may_begin: See `GradientSum`.
        exact: It has a ``grid``, and ``names`` of parameters in it.
    """

    def __init__(
        self, replica: Replica, may_begin: Callable[[], bool], exact: Any
    ) -> None:
        super().__init__(replica, may_begin)
        self._grid, self._names = exact.grid, exact.names
        self.totals: list[Total] = []
        self._divisor: int | torch.Tensor = 1

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        self.gradients = {p: torch.zeros_like(p.detach()) for p in parameters}
        self.totals = [Total(self._grid, self._names[p], p) for p in parameters]

    def use_zeros(self) -> None:
        pass  # totals are zero

    def end_minibatch(self) -> None:
        """Adds the gradients of a minibatch."""
        for parameter, total in zip(self.gradients, self.totals):
            total.add_(parameter.grad)
            parameter.grad = None

    def sum_(self, others: Sequence[torch.Tensor], divisor: Any) -> None:
        self._divisor = 1 if divisor is None else divisor
        own = [part for total in self.totals for part in total.parts]
        self._replica.all_reduce_([*own, *others])

    def commit(self) -> None:
        """Makes ``.grad`` the means that the sums amount to; weighted ones are sums."""
        divisors = self._grid.divisors(self._divisor)
        for (parameter, gradient), total in zip(self.gradients.items(), self.totals):
            parameter.grad = total.mean_into_(gradient, divisors)

    def clear(self) -> None:
        for total in self.totals:
            total.zero_()
        for parameter in self.gradients:
            parameter.grad = None


def _blocks(*tensors: torch.Tensor) -> Iterable[Sequence[torch.Tensor]]:
    """Returns parts of tensors that fit into caches; they share memory."""
    is_plain = all(tensor.is_contiguous() for tensor in tensors)
    if tensors[0].numel() <= _BLOCK or not is_plain:
        return [tensors]
    return zip(*(tensor.view(-1).split(_BLOCK) for tensor in tensors))


def _add_blocks_(total: torch.Tensor, value: torch.Tensor, up: Any) -> float:
    """Adds multiples on the host; returns the largest number, as `Grid.seen` has it."""
    largest = 0.0
    for value_part, total_part in _blocks(value, total):
        low, high = (each.item() for each in torch.aminmax(value_part))
        if not (math.isfinite(low) and math.isfinite(high)):
            return math.inf
        largest = max(largest, -low, high)
        total_part.add_(torch.mul(value_part, up).round_())
    return largest


def _value_of_limbs(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Returns the number that two sums of limbs make, in units of the high one.

    Split so that only the last addition may lose more than 2^-24 of the result.
    """
    half = 2 ** (LOW_BITS - 1)
    carry = (low + half) >> LOW_BITS
    high, low = high + carry, low - (carry << LOW_BITS)
    top = (high + 128) >> 8 << 8  # 24 bits, as `low` has
    rest = (high - top).float() + low.float() * 2.0**-LOW_BITS
    return top.float() + rest
