"""Where a layer's connections have been: on the device, and part of every update."""

from __future__ import annotations

import dataclasses

import torch

# What `History.counts` counts, in this order.
COUNTS = ("num_active", "num_grown", "num_dropped", "num_explored")


@dataclasses.dataclass(eq=False)
class History:
    """What the masks of one layer have been up to now.

    Kept in every update, asked for or not: what is computed only when somebody looks
    would be another program.

    Attributes:
        ever: bool of the weight's shape, True where a connection was ever active.
        counts: int32 ``(4,)`` on the same device, `COUNTS`: active connections; grown
            and dropped by the last update; ever active. Replaced by every update, not
            written to.
    """

    ever: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def begin(cls, mask: torch.Tensor, num_active: int) -> History:
        """Of a first mask."""
        return cls.resume(mask.clone(), num_active, num_active)

    @classmethod
    def resume(cls, ever: torch.Tensor, num_active: int, num_ever: int) -> History:
        """Of a layer whose connections have moved before."""
        counts = torch.tensor([num_active, 0, 0, num_ever], dtype=torch.int32)
        return cls(ever, counts.to(ever.device))

    def follow(self, device: torch.device) -> None:
        """Moves to where the mask is."""
        if self.ever.device != device:
            self.ever, self.counts = self.ever.to(device), self.counts.to(device)

    def record(self, new: torch.Tensor, kept: torch.Tensor) -> None:
        """Takes in an update.

        Args:
            new: bool, the next mask.
            kept: bool, what it has in common with the mask before.
        """
        self.ever.logical_or_(new)
        # 32 bits: on a CPU, a sum of bools is seven times as fast, and a layer of 2**31
        # weights has no gradient that could be sorted.
        active, stayed, ever = (
            mask.sum(dtype=torch.int32) for mask in (new, kept, self.ever)
        )
        before = self.counts[0]
        self.counts = torch.stack([active, active - stayed, before - stayed, ever])
