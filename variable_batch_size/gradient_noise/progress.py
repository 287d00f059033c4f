"""The sum of gains: how many steps at the reference batch size training is worth."""

from __future__ import annotations

import math

import torch

from xla_replica import Replica


class Progress:
    """Scale-invariant iterations: the sum of the overall gains (arXiv:2007.05105).

    It is on the device, as an integer and a fraction: one float would lose fractions as
    it grows. The host knows between which bounds it is.

    Args:
        dtype: The dtype of the gains.
        replica: The replica that the caller runs in.

    Attributes:
        tensors: The integer and the fraction, ``(1,)`` each.
        bounds: The least and the most that the sum can be, as far as the host knows.
        last_read: What it was when the device was last read.
    """

    def __init__(self, dtype: torch.dtype, replica: Replica) -> None:
        self._replica = replica
        self.tensors = (
            torch.zeros(1, dtype=torch.int64, device=replica.device),
            torch.zeros(1, dtype=dtype, device=replica.device),
        )
        self.bounds = (0.0, 0.0)
        self.last_read = 0.0

    def add(self, gain: torch.Tensor, batch_ratio: float | None) -> None:
        """Adds an update's gain, ``(1,)``, which is between 1 and its batch ratio.

        The ratio is None where the host does not know it.
        """
        whole, fraction = self.tensors
        total = fraction + gain
        floor = total.floor()
        self.tensors = (whole + floor.to(torch.int64), total - floor)
        low, high = self.bounds
        if batch_ratio is None:
            self.bounds = (low, math.inf)
        else:
            self.bounds = (low + min(1.0, batch_ratio), high + max(1.0, batch_ratio))

    def read(self) -> float:
        """Returns the sum; reads the device."""
        return self.note(*self._replica.fetch(list(self.tensors)))

    def note(self, whole: torch.Tensor, fraction: torch.Tensor) -> float:
        """Takes what was read of the tensors; returns the sum."""
        self.last_read = whole.item() + fraction.item()
        self.bounds = (self.last_read, self.last_read)
        return self.last_read

    def load(self, whole: torch.Tensor, fraction: torch.Tensor) -> None:
        """Continues from tensors that were saved."""
        self.note(whole, fraction)
        device, dtype = self._replica.device, self.tensors[1].dtype
        self.tensors = (whole.to(device), fraction.to(dtype).to(device))
