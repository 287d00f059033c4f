"""Sums of a few numbers over minibatches and replicas, exact ones if asked for."""

from __future__ import annotations

import math

import torch

from xla_replica.backends.replica import Replica
from xla_replica.device.comparisons import where_finite

_LIMB_BITS = 16
# Of the limbs, from the lowest: all normal numbers of float32 are their multiples, as
# far as they have any digits there.
_EXPONENTS = range(-126, 128, _LIMB_BITS)


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
