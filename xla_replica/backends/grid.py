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
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from xla_replica.device.comparisons import comparable, where_finite
from xla_replica.device.device_traits import traits

if TYPE_CHECKING:
    from xla_replica.backends.replica import Replica

Divisor = int | torch.Tensor | None

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
        names: Of the tensors; a tensor's row is its place among them.
        replica: The replica whose tensors these are.

    Attributes:
        names: As given.
        max_terms: How many minibatches a sum can have.
    """

    def __init__(self, names: Sequence[str], replica: Replica) -> None:
        self.names: list[str] = []
        self._saved: Mapping[str, int] = {}
        self._replica = replica
        self._is_wide = traits(replica.device).has_float64
        self._bits = HIGH_BITS + LOW_BITS if self._is_wide else HIGH_BITS
        self.max_terms = 2 ** ((53 if self._is_wide else 31) - self._bits - UP) - 1
        # A table, and not exp2, which is not exact on every device.
        powers = torch.exp2(torch.arange(-_BIAS, 128, dtype=torch.float64)).float()
        self._powers = powers.to(replica.device)
        self._zero: torch.Tensor | float = 0.0
        if not replica.is_host:
            self._zero = torch.zeros((), dtype=torch.float32, device=replica.device)
        self.extend(names)

    def extend(self, names: Sequence[str]) -> int:
        """Appends tensors without a grid; returns the first one's row."""
        if self.names and self._largest is not self._nothing[0]:
            raise ValueError(
                f"{names[:1]} cannot be summed from the middle of a step on: build "
                "what asks for it between two updates"
            )
        first = len(self.names)
        self.names += names
        # Two tensors: one in both places would make another program.
        zeros = torch.zeros(len(self.names)).float().to(self._replica.device)
        self._nothing = zeros, zeros.clone()
        self.load_state_dict({**self._saved, **(self.state_dict() if first else {})})
        return first

    def _use_level(self) -> None:
        """Computes what each tensor is multiplied by, a power of two."""
        level = self._level.clamp(min=LEAST_EXPONENT + _BIAS)
        powers = self._powers.index_select(0, self._bits + 2 * _BIAS - level)
        self._up = powers.tolist() if self._replica.is_host else powers

    # --- a tensor of a minibatch ----------------------------------------------------

    def empty_total(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Returns the sum of no minibatch's tensors, for `add_`."""
        dtypes = [torch.float64] if self._is_wide else [torch.int32] * 2
        like = like.detach()
        return [torch.zeros_like(like, dtype=dtype) for dtype in dtypes]

    def add_(
        self, total: list[torch.Tensor], value: torch.Tensor | None, row: int
    ) -> None:
        """Adds a minibatch's tensor, of a dtype of at most 32 bits, to a total.

        None counts as zeros, which a lazy device adds: a program with another sequence
        of its tensors would be another program.
        """
        if value is None:
            if not self._replica.is_lazy:
                return
            value = torch.zeros_like(total[0], dtype=torch.float32)
        value = value.detach()
        value = (value.to_dense() if value.is_sparse else value).float()
        if not value.numel():
            return
        up = self._up[row]
        if not self._replica.is_host:
            add = _add_multiples_ if self._is_wide else _add_limbs_
            add(total, value, up)
            bad = value.new_full((), math.inf)
            self._seen[row] = torch.where(where_finite(value), value.abs(), bad).max()
            return
        largest = 0.0
        for value_part, total_part in _blocks(value, total[0]):
            low, high = (each.item() for each in torch.aminmax(value_part))
            if not (math.isfinite(low) and math.isfinite(high)):
                largest = math.inf
                break
            largest = max(largest, -low, high)
            _add_multiples_([total_part], value_part, up)
        self._seen[row] = largest

    def end_minibatch(self) -> None:
        """Notes the largest numbers of the tensors that were added."""
        if not self._seen:
            return
        found = [self._seen.get(row, self._zero) for row in range(len(self.names))]
        self._seen = {}
        is_host, dtype = self._replica.is_host, torch.float32
        new = torch.tensor(found, dtype=dtype) if is_host else torch.stack(found)
        is_finite = where_finite(new)
        new = torch.where(is_finite, new, torch.zeros_like(new))
        self._largest = torch.maximum(self._largest, new)
        self._is_bad = torch.maximum(self._is_bad, (~is_finite).float())

    # --- a step ---------------------------------------------------------------------

    def measure(self) -> torch.Tensor:
        """Looks at the largest numbers of all replicas. Collective.

        Returns:
            ``(1,)``: whether the step must be run again, with the units of its maxima,
            which `follow` takes.
        """
        if self._replica.num_replicas > 1:
            own = torch.stack([self._largest, self._is_bad])
            self._largest, self._is_bad = self._replica.all_gather(own).amax(0).unbind()
        level = (self._powers <= self._largest[:, None]).sum(1, dtype=torch.int32)
        level = level.clamp(min=LEAST_EXPONENT + _BIAS)
        zero = comparable(0.0, self._largest)
        counts = (self._largest > zero) & (self._is_bad == zero)
        moved = level - self._level
        is_beyond = (moved > UP) | (moved < -DOWN) | (self._level == 0)
        self._next_level = torch.where(counts, level, self._level)
        return (counts & is_beyond).any().reshape(1)

    def mean_into_(
        self,
        result: torch.Tensor,
        total: list[torch.Tensor],
        row: int,
        divisor: Divisor = None,
    ) -> None:
        """Replaces ``result`` by a total, divided by a number or by ``(1,)``, if any.

        It is NaN if the tensor of a minibatch was not finite. Call it after `measure`.
        """
        number = 1 if divisor is None else divisor
        if isinstance(number, torch.Tensor):
            number = number.reshape(())
        number = self._up[row] * number
        if not self._is_wide:
            result.copy_(_value_of_limbs(*total) / number)
        elif self._replica.is_host:
            for total_part, part in _blocks(total[0], result):
                part.copy_(total_part / number)
        else:
            result.copy_(total[0] / number)
        is_bad = self._is_bad[row] > comparable(0.0, self._is_bad)
        result.masked_fill_(is_bad, math.nan)

    def follow(self) -> None:
        """Takes the units that `measure` has found, and forgets the step."""
        self._level = self._next_level
        self._use_level()
        self.drop_step()

    def drop_step(self) -> None:
        """Forgets the largest numbers of the step."""
        self._seen = {}
        self._next_level = self._level
        self._largest, self._is_bad = self._nothing

    # --- what is saved --------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Returns the exponents of the tensors that have one, by name."""
        [level] = self._replica.fetch([self._level])
        return {name: e - _BIAS for name, e in zip(self.names, level.tolist()) if e}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes what `state_dict` has returned; other tensors have no exponent.

        Names that are not known yet may be appended later.
        """
        self._saved = state
        level = [state.get(name, -_BIAS) + _BIAS for name in self.names]
        level = torch.tensor(level, dtype=torch.int32)
        self._level = self._replica.send(level)
        self.drop_step()
        self._use_level()


def zero_(totals: Iterable[list[torch.Tensor]]) -> None:
    """Makes totals zero."""
    for total in totals:
        for tensor in total:
            tensor.zero_()


def _blocks(*tensors: torch.Tensor) -> Iterable[Sequence[torch.Tensor]]:
    """Returns parts of tensors that fit into caches; they share memory."""
    is_plain = all(tensor.is_contiguous() for tensor in tensors)
    if tensors[0].numel() <= _BLOCK or not is_plain:
        return [tensors]
    return zip(*(tensor.view(-1).split(_BLOCK) for tensor in tensors))


def _add_multiples_(
    total: list[torch.Tensor], value: torch.Tensor, up: torch.Tensor | float
) -> None:
    """Adds the multiples of the unit as float64. To multiply by ``up`` is exact."""
    total[0].add_(torch.mul(value, up).round_())


def _add_limbs_(
    total: list[torch.Tensor], value: torch.Tensor, up: torch.Tensor
) -> None:
    """Adds the same multiples as two limbs of int32; all but `round` is exact."""
    scaled = value * up
    high = torch.round(scaled)
    low = torch.round((scaled - high) * 2.0**LOW_BITS)
    total[0].add_(high.to(torch.int32))
    total[1].add_(low.to(torch.int32))


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
