"""Proof that all replicas use the same learning rates, at the price of one number.

A replica's loop body does not run once per update (see `ElasticOptimizer`), so a
learning rate that it changes may drift from its peers' without anything to notice
here. A hash of the hyperparameters therefore rides in the sum of the gradients: the sum
is the number of replicas times the own hash, or replicas differ.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from variable_batch_size.step.device_scalars import Numbers
from xla_replica import Replica, ReplicaError

# float32 holds integers below this exactly, in whatever order they are summed.
_EXACT = 2**24


class Agreement:
    """Collects, on the device, whether replicas have ever differed.

    Args:
        replica: The replica that the caller runs in.
        numbers: Uploads.
    """

    def __init__(self, replica: Replica, numbers: Numbers) -> None:
        self._replica = replica
        self._numbers = numbers
        self._modulus = _EXACT // replica.num_replicas
        self._difference = torch.zeros(1, device=replica.device)
        self._expected = 0

    def ballot(self, hyperparameters: tuple[Any, ...]) -> torch.Tensor:
        """``(1,)`` float32, to be summed over replicas together with the gradients."""
        own = zlib.crc32(repr(hyperparameters).encode()) % self._modulus
        self._expected = own * self._replica.num_replicas
        return self._numbers.get("ballot", own).clone()

    def count(self, summed: torch.Tensor) -> None:
        """Notes the outcome; reads it at once where reading is free."""
        expected = self._numbers.get("expected ballots", self._expected)
        self._difference.add_((summed - expected).abs())
        if self._replica.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Reads the device back.

        Raises:
            ReplicaError: Replicas have used different hyperparameters.
        """
        if self._replica.fetch([self._difference])[0].item() == 0:
            return
        raise ReplicaError(
            "replicas have updated their weights with different learning rates or "
            "other hyperparameters, and are no longer equal. A replica's loop body "
            "does not run once per update: call optimizer.attach(scheduler) once in "
            "place of scheduler.step() in the loop, or change hyperparameters between "
            "epochs",
            self._replica.rank,
        )
