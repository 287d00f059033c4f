"""Every sample's gradient, or its projection, out of a module's backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grab_xla.balancers import Ordering
from grab_xla.balancing.decisions import without_nan
from grab_xla.balancing.rows import FactoredRows
from grab_xla.gradients.groups import not_recorded, of_another_model
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


class SampleGradients:
    """What is balanced of every sample's gradient, and how a capture makes it.

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

    def record(self, model: nn.Module, options: Mapping[str, Any]) -> Capture:
        """Returns a capture of a forward pass, which replaces an earlier one."""
        self._capture = Capture(model, self._names, **options)
        return self._capture

    def backpropagate(
        self,
        losses: Tensor,
        reduction: Literal["mean", "sum"],
        ordering: Ordering | None,
        from_samples: bool,
    ) -> dict[str, Tensor] | Tensor | FactoredRows:
        """Runs the backward pass of the mean loss, or of the sum.

        Args:
            losses: ``(B,)``.
            reduction: ``"mean"`` or ``"sum"``.
            ordering: What balances rows that are known by their factors; None if all
                rows must be formed.
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
        found: dict[str, Tensor] | Tensor | FactoredRows
        projection = self.projection
        if projection is None:
            found = self._exact(capture, losses, reduction, ordering, from_samples)
        elif capture.params.keys() == projection.shapes.keys():
            found = capture.project(losses, projection, accumulate=reduction)
        else:
            found = capture.stream(
                losses, lambda each: each.project(projection), accumulate=reduction
            )
        if capture.unused == capture.params.keys():
            raise of_another_model()
        return found

    def _exact(
        self,
        capture: Capture,
        losses: Tensor,
        reduction: Literal["mean", "sum"],
        ordering: Ordering | None,
        from_samples: bool,
    ) -> dict[str, Tensor] | FactoredRows:
        """Returns gradients, of which some are known by their factors."""
        from_samples = from_samples and len(losses) > 0
        factored: list[Factors] = []
        sums: dict[str, Tensor] = {}

        def rows(factors: Factors) -> dict[str, Tensor]:
            if ordering is not None and factors.compression >= LEAST_COMPRESSION:
                factored.append(factors)
                return {}
            formed = factors.materialize()
            if from_samples:
                for name, gradients in formed.items():
                    sums[name] = getattr(gradients, reduction)(0)
            return formed

        formed = capture.stream(
            losses, rows, accumulate=None if from_samples else reduction
        )
        if from_samples:
            weight = 1 / len(losses) if reduction == "mean" else 1.0
            for each in factored:
                sums |= each.weighted_sum(torch.full_like(losses, weight))
            capture.add_gradients(sums)
        if ordering is None:
            return formed
        if not self._are_worth_it(factored, len(losses), ordering):
            while factored:
                formed |= factored.pop().materialize()
        if not factored and ordering.needs_gram:
            return formed
        shapes = {name: tuple(p.shape) for name, p in self.balanced.items()}
        finite = {name: without_nan(rows) for name, rows in formed.items()}
        return FactoredRows(shapes, factored, finite)

    def _are_worth_it(
        self, factored: list[Factors], num_samples: int, ordering: Ordering
    ) -> bool:
        """Returns whether balancing factors takes less than forming the gradients."""
        if not factored:
            return False
        spared = sum(math.prod(s) for each in factored for s in each.shapes.values())
        total = sum(p.numel() for p in self.balanced.values())
        least = LEAST_SPARED * ordering.num_vectors
        if not ordering.needs_gram:
            least //= 4
        enough = num_samples * spared >= min(least, MOST_FORMED)
        return 2 * spared > total and enough
