"""Every sample's gradient to balance, out of a module's ordinary backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grab_xla.balancers import Ordering
from grab_xla.balancing.decisions import without_nan
from grab_xla.balancing.rows import FactoredRows
from grab_xla.recording.refusals import not_recorded, of_another_model
from per_sample_grad import Capture, Factors, Projection
from xla_replica.common.arguments import check_choice

# Forming gradients takes less time where a layer is applied to many positions of a
# sample, as convolutions are, whose factors are not that much smaller. A layer that is
# applied once to a sample is above this, unless it has few outputs.
LEAST_COMPRESSION = 8
# How many numbers of formed gradients, for each vector of the balance, take as long to
# form and balance as products of their factors do; measured on a CPU. Without products
# of rows with one another it is a quarter of that.
LEAST_SPARED = 2**20
# So many numbers take too much memory, whatever time factors take: 64 MiB in float32.
MOST_FORMED = 2**24


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

    def backward(
        self,
        losses: Tensor,
        reduction: Literal["mean", "sum"] = "mean",
        taker: Ordering | None = None,
        from_samples: bool = False,
    ) -> dict[str, Tensor] | Tensor | FactoredRows:
        """Runs the backward pass of the mean loss, or of the sum.

        Args:
            losses: ``(B,)``.
            reduction: ``"mean"`` or ``"sum"``.
            taker: What takes rows that are known by their factors, if that may be.
            from_samples: ``.grad`` gets the mean, or the sum, of gradients of samples,
                if these are not projected.

        Returns:
            What is balanced of every sample: ``(B, ...)`` by name, ``(B, columns)``
            for all parameters together, or rows that are not formed.

        Raises:
            RuntimeError: No forward pass was recorded, or the losses do not depend on
                the parameters.
            ValueError: ``reduction`` is not allowed.
            PerSampleError: As for `Capture.backward`.
        """
        if self._capture is None:
            raise not_recorded()
        check_choice("reduction", reduction, ("mean", "sum"))
        capture, self._capture = self._capture, None
        found = self._balanced(capture, losses, reduction, taker, from_samples)
        if capture.unused == capture.params.keys():
            raise of_another_model()
        return found

    def _balanced(
        self,
        capture: Capture,
        losses: Tensor,
        reduction: Literal["mean", "sum"],
        taker: Ordering | None,
        from_samples: bool,
    ) -> dict[str, Tensor] | Tensor | FactoredRows:
        """Returns what `backward` returns."""
        projection = self.projection
        if projection is not None:
            if capture.params.keys() == projection.shapes.keys():
                return capture.project(losses, projection, accumulate=reduction)
            return capture.stream(
                losses, lambda each: each.project(projection), accumulate=reduction
            )
        from_samples = from_samples and len(losses) > 0
        kept: list[Factors] = []
        sums: dict[str, Tensor] = {}

        def rows(factors: Factors) -> dict[str, Tensor]:
            if taker is not None and factors.compression >= LEAST_COMPRESSION:
                kept.append(factors)
                return {}
            found = factors.materialize()
            if from_samples:
                sums.update({n: _reduced(rows, reduction) for n, rows in found.items()})
            return found

        found = capture.stream(
            losses, rows, accumulate=None if from_samples else reduction
        )
        if from_samples:
            weight = 1 / len(losses) if reduction == "mean" else 1.0
            for each in kept:
                sums |= each.weighted_sum(torch.full_like(losses, weight))
            capture.add_gradients(sums)
        spared = sum(math.prod(s) for each in kept for s in each.shapes.values())
        total = sum(p.numel() for p in self.balanced.values())
        if taker is not None:
            least = LEAST_SPARED * taker.num_vectors
            if not taker.needs_gram:
                least //= 4
            least = min(least, MOST_FORMED)
            if 2 * spared <= total or len(losses) * spared < least:
                while kept:
                    found |= kept.pop().materialize()
            if kept or not taker.needs_gram:
                shapes = {name: tuple(p.shape) for name, p in self.balanced.items()}
                formed = {name: without_nan(rows) for name, rows in found.items()}
                return FactoredRows(shapes, kept, formed)
        return found


def _reduced(rows: Tensor, reduction: str) -> Tensor:
    return rows.mean(0) if reduction == "mean" else rows.sum(0)
