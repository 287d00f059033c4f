"""Per-minibatch state that is committed or discarded with its step.

A run has parts by name. What a part sums over replicas travels with the gradients.
"""

from __future__ import annotations

import torch

from variable_batch_size.data.schedule import Step


class Part:
    """What an update asks of a part, in this sequence; by default nothing."""

    def begin_minibatch(self, step: Step | None) -> None:
        """Prepares for a backward pass of a step; None after the epoch's last one."""

    def end_minibatch(self, weight: torch.Tensor | None) -> None:
        """Adds what a backward pass has left; gradients are not taken in yet."""

    def prepare(self, step: Step) -> None:
        """Uploads what the update needs, and gathers what no sum can hold."""

    def tensors(self) -> list[torch.Tensor]:
        """Returns what is summed over replicas, in place."""
        return []

    def look(self, step: Step) -> None:
        """Raises an error if the sums show that this step must not be committed."""

    def commit(self, step: Step) -> None:
        """Uses the sums, right before the weights change."""

    def clear(self) -> None:
        """Forgets the minibatches of the step, summed or not."""
