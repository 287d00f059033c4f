"""Every sample's gradient, or its projection, and the rows that are balanced of it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from grab_xla.gradients.groups import of_another_model
from grab_xla.gradients.row_copies import flattened
from per_sample_grad import Capture, CoverageError, Dense, Projection
from xla_replica import full_matmul_precision, traits, where_finite

# How many numbers are formed at once: 4 and 64 MiB in float32. Smaller pieces would
# take notable time in calls.
PIECE_ON_HOST, PIECE_ON_DEVICE = 2**20, 2**24


def sample_gradients(
    capture: Capture,
    projection: Projection | None,
    losses: Tensor,
    reduction: Literal["mean", "sum"],
    from_samples: bool = False,
) -> Mapping[str, Tensor] | Tensor:
    """Runs the backward pass of the mean loss, or of the sum.

    Args:
        capture: The recorded forward pass.
        projection: Gradients are projected by this.
        losses: ``(B,)``.
        reduction: ``"mean"`` or ``"sum"``.
        from_samples: ``.grad`` gets the mean, or the sum, of gradients of samples, if
            these are not projected.

    Returns:
        What is balanced of every sample: gradients, ``(B, ...)`` by name, or ``(B,
        columns)``, projections of all parameters.

    Raises:
        RuntimeError: The losses do not depend on the parameters.
        PerSampleError: As for `Capture.backward`.
    """
    from_samples = from_samples and projection is None and len(losses) > 0
    accumulate = None if from_samples else reduction
    rows: dict[str, Tensor] | Tensor
    try:
        if projection is None:
            rows = capture.materialize(losses, accumulate=accumulate)
        else:
            rows = capture.project(losses, projection, accumulate=accumulate)
    except CoverageError as error:
        raise CoverageError(
            f"{error}. Give such options to sampler.record(), or balance groups, for "
            'any model: GraBSampler(..., fidelity="group")'
        ) from error
    if capture.unused == capture.params.keys():
        raise of_another_model()
    if from_samples:
        assert isinstance(rows, dict)
        sums = {name: getattr(each, reduction)(0) for name, each in rows.items()}
        capture.add_gradients(sums)
    return rows


@dataclasses.dataclass(frozen=True)
class GradientMatrix:
    """Turns the gradients of a step into rows ``(B, K)``, parameter after parameter.

    Rows are gradients or projections of them, or either of norm one. A whole copy of
    the gradients is made only where the balance needs it.

    Attributes:
        shapes: Those of gradients, by name, in the sequence of the columns.
        projection: Projects gradients; None: they are balanced as they are.
        normalize: Whether rows are divided by their norms.
        dtype, device: Those of the rows.
    """

    shapes: Mapping[str, tuple[int, ...]]
    projection: Projection | None
    normalize: bool
    dtype: torch.dtype
    device: torch.device

    @functools.cached_property
    def num_columns(self) -> int:
        """K."""
        if self.projection is not None:
            return self.projection.size
        return sum(map(math.prod, self.shapes.values()))

    def pieces(
        self, grads: Mapping[str, Tensor] | Tensor, multiple: int | None
    ) -> Iterable[Tensor]:
        """Returns the rows, some after the others.

        All come at once where they are projections, which are small, or one matrix, and
        on a lazy backend, where every piece would be a part of the program.

        Args:
            grads: ``(B, columns)`` of all parameters, or ``(B, *shape)`` for every one.
            multiple: A piece has a multiple of so many rows, but for the last one. None
                means all rows.
        """
        if isinstance(grads, Tensor):
            return [self._rows([grads])]
        values = [grads[name].detach() for name in self.shapes]
        kind = traits(self.device)
        numbers = PIECE_ON_HOST if kind.is_host else PIECE_ON_DEVICE
        if self.projection is not None:
            projected = functools.partial(self._projections, numbers=numbers)
            return [self._rows([*map(projected, self.shapes, values)])]
        if multiple is None or kind.is_lazy:
            return [self._rows(values)]
        size = max(1, numbers // (multiple * self.num_columns)) * multiple
        return map(self._rows, zip(*(value.split(size) for value in values)))

    def _rows(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns the rows of some samples, given their gradients by parameter."""
        is_lazy, columns = traits(self.device).is_lazy, []
        for each in gradients:
            flat = flattened(each) if is_lazy else each.unsqueeze(1).flatten(1)
            columns.append(flat.to(device=self.device, dtype=self.dtype))
        rows = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        return normalized(rows) if self.normalize else rows

    def _projections(self, name: str, gradients: Tensor, numbers: int) -> Tensor:
        """Returns projections of one parameter's gradients, formed in parts."""
        assert self.projection is not None
        shape = self.shapes[name] or (1,)
        found, size = [], max(1, numbers // math.prod(shape))
        with full_matmul_precision(self.device):
            for part in gradients.split(size):
                values = part.to(self.device, self.dtype).reshape(len(part), *shape)
                found.append(self.projection.of(name, [Dense(values)], 4 * numbers))
        return torch.cat(found)

    def checked(
        self, grads: Mapping[str, Tensor], batched: bool
    ) -> tuple[Mapping[str, Tensor], int]:
        """Returns gradients with a batch axis, and of how many samples they are."""
        if grads.keys() != self.shapes.keys():
            raise ValueError(
                "step() needs gradients of exactly the sampler's parameters; missing "
                f"{sorted(self.shapes.keys() - grads.keys())[:5]}, unknown "
                f"{sorted(grads.keys() - self.shapes.keys())[:5]}"
            )
        if not batched:
            grads = {name: each.unsqueeze(0) for name, each in grads.items()}
        num_rows = len(next(iter(grads.values())))
        for name, shape in self.shapes.items():
            received = tuple(grads[name].shape)
            if received != (num_rows, *shape):
                raise ValueError(
                    f"step(): the gradient of {name!r} has shape {received}; a "
                    f"parameter of shape {shape} needs (B, {str(shape)[1:]}, and all "
                    f"the same B, such as {num_rows}"
                )
        return grads, num_rows


def normalized(rows_BD: Tensor) -> Tensor:
    """Returns rows of norm one; zeros stay, rows without a finite norm become NaN."""
    norms = torch.linalg.vector_norm(rows_BD, dim=1, keepdim=True)
    divisors = torch.where(where_finite(norms), norms.clamp(min=1e-12), torch.nan)
    return rows_BD / divisors
