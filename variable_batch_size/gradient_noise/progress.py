"""A sum of gains that stays on the device, and what the host knows of it."""

from __future__ import annotations

import torch

from xla_replica import Replica


class Progress:
    """Scale-invariant iterations: the sum of the gains (arXiv:2007.05105).

    Args:
        replica: Where the gains are.
        dtype: Of the gains.
    """

    def __init__(self, replica: Replica, dtype: torch.dtype) -> None:
        self._replica = replica
        # Whole steps and a fraction: one float would lose fractions as the sum grows.
        self.whole = torch.zeros(1, dtype=torch.int64, device=replica.device)
        self.fraction = torch.zeros(1, dtype=dtype, device=replica.device)
        self.bounds = (0.0, 0.0)
        self.last_read = 0.0

    def add(self, gain: torch.Tensor, batch_ratio: float) -> None:
        """Adds one update's gain, ``(1,)``, between 1 and the batch ratio."""
        total = self.fraction + gain
        whole = total.floor()
        self.whole = self.whole + whole.to(torch.int64)
        self.fraction = total - whole
        low, high = self.bounds
        self.bounds = (low + min(1.0, batch_ratio), high + max(1.0, batch_ratio))

    def read(self) -> float:
        """The sum; reads the device."""
        return self.note(*self._replica.fetch([self.whole, self.fraction]))

    def note(self, whole: torch.Tensor, fraction: torch.Tensor) -> float:
        """Takes what was read of `whole` and `fraction`; returns the sum."""
        value = whole.item() + fraction.item()
        self.bounds, self.last_read = (value, value), value
        return value

    def load(self, whole: torch.Tensor, fraction: torch.Tensor) -> None:
        """Goes on from what was read."""
        self.note(whole, fraction)
        self.whole = whole.to(self._replica.device)
        self.fraction = fraction.to(self.fraction.dtype).to(self._replica.device)
