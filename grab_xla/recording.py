"""Gradients of an ordinary module to balance, out of its ordinary backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from per_sample_grad import Capture, Factors, Projection
from xla_replica.common.arguments import check_choice

Fidelity = Literal["exact", "projected"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)


class Recording:
    """What of every sample's gradient is balanced, and how a capture makes it.

    Args:
        parameters: The parameters, by name.
        fidelity: ``"exact"``: gradients themselves. ``"projected"``: their two-sided
            random projections, which are made without forming a gradient.
        size: The most numbers of a projection.
        seed: The seed of the projection.

    Raises:
        TypeError, ValueError: An argument is not allowed.

    Attributes:
        projection: The map of ``"projected"``, else None.
        balanced: Tensors of the shapes of what is balanced, by name.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], fidelity: Fidelity, size: int, seed: int
    ) -> None:
        _check_parameters(parameters)
        check_choice("fidelity", fidelity, FIDELITIES)
        self._names = list(parameters)
        self.projection: Projection | None = None
        self.balanced = parameters
        if fidelity == "projected":
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

    def backward(self, losses: Tensor) -> dict[str, Tensor]:
        """Runs the backward pass of the mean loss.

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
        return capture.stream(losses, self._rows, accumulate="mean")

    def _rows(self, factors: Factors) -> dict[str, Tensor]:
        if self.projection is None:
            return factors.materialize()
        return factors.project(self.projection)


def _check_parameters(parameters: object) -> None:
    """Raises TypeError or ValueError unless names are mapped to some tensors."""
    if not isinstance(parameters, Mapping) or not all(
        isinstance(value, Tensor) for value in parameters.values()
    ):
        raise TypeError(
            "trainable_params must map names to tensors, such as "
            f"dict(model.named_parameters()); got {type(parameters).__name__}"
        )
    if not parameters:
        raise ValueError("trainable_params is empty: there is nothing to balance")
