"""What belongs to the minibatches of a step beside their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xla_replica.backends.replica import Replica
from xla_replica.backends.row_units import RowTotal


class Rider:
    """Per-minibatch state that is committed or discarded with its step.

    Of what an optimizer tells whose steps may be run again, it does what concerns it.
    """

    def end_minibatch(self) -> None:
        """Adds what a minibatch has left to the step's."""

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

    def extend(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes named tensors, of which it needs nothing."""

    def divisors(self, count: Any = 1) -> Any:
        """Returns what makes any sum a mean."""
        return count.reshape(()) if isinstance(count, torch.Tensor) else count

    def total(self, name: str, like: torch.Tensor) -> FloatTotal:
        """Returns a sum of tensors of the shape and device of ``like``."""
        del name
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
