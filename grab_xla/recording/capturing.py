"""Every sample's gradient to balance, out of a module's ordinary backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from per_sample_grad import Capture, Factors, Projection


class Recording:
    """What of every sample's gradient is balanced, and how a capture makes it.

    Args:
        parameters: The parameters, by name.
        size: The most numbers of a projection; None: gradients are not projected.
        seed: The seed of the projection.

    Raises:
        TypeError, ValueError: An argument is not allowed.

    Attributes:
        projection: The map of projected gradients, else None.
        balanced: Tensors of the shapes of what is balanced, by name.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], size: int | None, seed: int
    ) -> None:
        self._names = list(parameters)
        self.projection: Projection | None = None
        self.balanced = parameters
        if size is not None:
            self.projection = Projection(parameters, size, seed=seed)
            self.balanced = {
                name: torch.empty(rows * columns, device="meta")
                for name, (rows, columns) in self.projection.kept.items()
            }
        self._capture: Capture | None = None

    def start(self, model: nn.Module, options: Mapping[str, Any]) -> Capture:
        """Returns a capture of a forward pass, which takes the place of another."""
        self._capture = Capture(model, self._names, **options)
        return self._capture

    def backward(self, losses: Tensor, reduction: str = "mean") -> dict[str, Tensor]:
        """Runs the backward pass of the mean loss, or of the sum.

        Returns:
            What is balanced of every sample, ``(B, ...)`` by name.

        Raises:
            RuntimeError: No forward pass was recorded.
            PerSampleError: As for `Capture.backward`.
        """
        if self._capture is None:
            raise RuntimeError(
                "backward() without record(): compute the losses inside "
                "`with sampler.record(model):`, once for every backward()"
            )
        capture, self._capture = self._capture, None
        return capture.stream(losses, self._rows, accumulate=reduction)

    def _rows(self, factors: Factors) -> dict[str, Tensor]:
        if self.projection is None:
            return factors.materialize()
        return factors.project(self.projection)
