"""Whether replicas stop after this update: agreed on at the price of one number.

A signal reaches one process, or all of them at different moments, and a replica that
stops alone leaves its peers waiting. So every replica says in the sum of the gradients
whether it has been asked to stop. Reading that sum would be a host round trip, so a
replica reads it only where it has been asked itself: replicas that all were asked find
the same sum, their number, at the same update. Where only some were asked, the update
at which everybody looks, `look`, finds them.
"""

from __future__ import annotations

import torch

import xla_replica
from variable_batch_size.step.device_scalars import Numbers
from xla_replica import Replica


class StopVote:
    """Votes ride along with gradients; the outcome stays on the device until asked.

    Args:
        replica: The replica that the caller runs in.
        numbers: Uploads.
    """

    def __init__(self, replica: Replica, numbers: Numbers) -> None:
        self._replica = replica
        self._numbers = numbers
        self._asked = False
        self._votes: torch.Tensor | None = None

    def ballot(self) -> torch.Tensor:
        """``(1,)`` float32, to be summed over replicas together with the gradients."""
        self._asked = xla_replica.stop_requested() is not None
        return self._numbers.get("stop", float(self._asked)).clone()

    def count(self, summed: torch.Tensor) -> None:
        """Keeps the outcome of an update."""
        self._votes = summed

    def agreed(self, look: bool) -> bool:
        """Whether all replicas stop after the update that was counted last.

        Args:
            look: Whether every replica looks at this update, also one that was not
                asked; the same on all of them. Reads the device. On a CPU, where
                reading is free, everybody always does.
        """
        everybody = look or self._replica.device.type == "cpu"
        if self._votes is None or not (self._asked or everybody):
            return False
        votes = self._replica.fetch([self._votes])[0].item()
        return votes > 0 if everybody else votes == self._replica.num_replicas
