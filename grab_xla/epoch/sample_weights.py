"""What samples' gradients are multiplied by in the balance, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from xla_replica.common.arguments import check_choice

# From the number of an epoch to numbers by position in its order, or None: all equal.
WeightsOf = Callable[[int], Sequence[float] | np.ndarray | None]
Weights = Literal["equal", "update"] | WeightsOf


class SampleWeights:
    """The weights of an order's samples in every epoch.

    Args:
        weights: See `GraBSampler`.
        num_samples: The length of the order.

    Attributes:
        name: ``"equal"``, ``"update"`` or ``"given"``.
    """

    def __init__(self, weights: Weights, num_samples: int) -> None:
        if not callable(weights):
            check_choice("weights", weights, ("equal", "update"))
        self.name = "given" if callable(weights) else weights
        self._of_epoch = weights if callable(weights) else None
        self._num_samples = num_samples
        self._last: tuple[int, Tensor | None] = (-1, None)

    def follow(self, weights_of: WeightsOf) -> None:
        """Takes the weights of updates from what knows them."""
        if self.name == "update":
            self._of_epoch = weights_of

    def of(self, epoch: int) -> Tensor | None:
        """Returns ``(num_samples,)`` float64 on the CPU, or None: all weigh the same.

        Raises:
            ValueError: Nobody knows the updates, or weights are not allowed.
        """
        if self.name == "equal":
            return None
        if self._of_epoch is None:
            raise ValueError(
                "weights='update' needs an elastic sampler, which knows the updates: "
                "CustomSampler(..., order=sampler); in another loop pass a function "
                "from the epoch to the weights"
            )
        if self._last[0] != epoch:
            weights = self._of_epoch(epoch)
            self._last = epoch, None if weights is None else self._checked(weights)
        return self._last[1]

    def _checked(self, weights: Sequence[float] | np.ndarray) -> Tensor:
        values = np.asarray(weights, dtype=np.float64)
        fits = values.shape == (self._num_samples,)
        if not fits or not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(
                f"the weights of an epoch must be {self._num_samples} finite numbers "
                f"of at least 0, got {weights!r}"
            )
        return torch.from_numpy(values)
