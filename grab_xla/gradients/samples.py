"""Every sample's gradient, or its projection, and the rows that are balanced of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from grab_xla.gradients.groups import of_another_model
from grab_xla.gradients.row_copies import flattened
from per_sample_grad import Capture, Dense, Factors, Projection
from xla_replica import full_matmul_precision, traits, where_finite
from xla_replica.common.arguments import check_type

# How many numbers are formed at once: 4 and 64 MiB in float32. Smaller pieces would
# take notable time in calls.
PIECE_ON_HOST, PIECE_ON_DEVICE = 2**20, 2**24
# The bytes of temporary tensors of a projection of such a piece.
_BUDGET = 4 * PIECE_ON_DEVICE


def sample_gradients(
    capture: Capture,
    losses: Tensor,
    reduction: Literal["mean", "sum"],
    projection: Projection | None = None,
    from_samples: bool = False,
) -> Mapping[str, Tensor] | Tensor:
    """Runs the backward pass of the mean loss, or of the sum.

    Args:
        capture: The recorded forward pass.
        losses: ``(B,)``.
        reduction: ``"mean"`` or ``"sum"``.
        projection: Gradients are projected by this.
        from_samples: ``.grad`` gets the mean, or the sum, of gradients of samples, if
            these are not projected.

    Returns:
        What is balanced of every sample: gradients, ``(B, ...)`` by name, or ``(B,
        columns)``, projections of all parameters.

    Raises:
        RuntimeError: The losses do not depend on the parameters.
        PerSampleError: As for `Capture.backward`.
    """
    rows: Mapping[str, Tensor] | Tensor
    if projection is None:
        rows = _formed(capture, losses, reduction, from_samples and len(losses) > 0)
    else:
        rows = capture.project(losses, projection, accumulate=reduction)
    if capture.unused == capture.params.keys():
        raise of_another_model()
    return rows


def _formed(
    capture: Capture,
    losses: Tensor,
    reduction: Literal["mean", "sum"],
    from_samples: bool,
) -> dict[str, Tensor]:
    later: list[Factors] = []

    def form(factors: Factors) -> dict[str, Tensor]:
        # What is formed at the end is not in memory together with activations.
        if factors.compression > 1:
            later.append(factors)
            return {}
        return factors.materialize()

    accumulate = None if from_samples else reduction
    found = capture.stream(losses, form, accumulate=accumulate)
    while later:
        found |= later.pop().materialize()
    if from_samples:
        sums = {name: getattr(each, reduction)(0) for name, each in found.items()}
        capture.add_gradients(sums)
    return found


class GradientMatrix:
    """Turns the gradients of a step into rows ``(B, K)``, parameter after parameter.

    Rows are gradients or projections of them, or either of norm one. A whole copy of
    the gradients is made only where the balance needs it.

    Args:
        shapes: Those of gradients, by name, in the sequence of the columns.
        projection: Projects gradients; None: they are balanced as they are.
        normalize: Whether rows are divided by their norms.
        dtype: The dtype of the rows.
        device: The device of the rows.

    Attributes:
        shapes: As they were given.
        num_columns: K.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        projection: Projection | None,
        normalize: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes = shapes
        self._projection, self._normalize = projection, normalize
        self._dtype, self._device = dtype, device
        self._num_inputs = self.num_columns = sum(map(math.prod, shapes.values()))
        # The shapes of projections that are given.
        self._projected: dict[str, tuple[int, ...]] = {}
        if projection is not None:
            self.num_columns = projection.size
            kept = projection.kept.items()
            self._projected = {name: (math.prod(sides),) for name, sides in kept}

    def pieces(
        self, grads: Mapping[str, Tensor] | Tensor, multiple: int | None
    ) -> Iterable[Tensor]:
        """Returns the rows, some after the others, each time they are iterated over.

        All come at once where gradients are one matrix, and on a lazy backend, where
        every piece would be a part of the program. A projection is small, but what is
        formed on the way to it may not be; so it is formed in pieces and comes at once.
        What comes at once is formed once; several pieces are formed every time.

        Args:
            grads: ``(B, columns)`` of all parameters, or for every parameter
                ``(B, *shape)`` or its projections.
            multiple: A piece has a multiple of so many rows, but for the last one. None
                means all rows.
        """
        if isinstance(grads, Tensor):
            return [self._rows([grads])]
        values = [grads[name].detach() for name in self.shapes]
        kind, projects = traits(self._device), self._projection is not None
        if projects:
            multiple = 1
        pieces: list[Sequence[Tensor]] = [values]
        if multiple is not None and not kind.is_lazy:
            numbers = PIECE_ON_HOST if kind.is_host else PIECE_ON_DEVICE
            size = max(1, numbers // (multiple * self._num_inputs)) * multiple
            pieces = list(zip(*(value.split(size) for value in values)))
        form = self._projected_rows if projects else self._rows
        if len(pieces) > 1 and not projects:
            return _Pieces(form, pieces)
        rows = [form(columns) for columns in pieces]
        return [rows[0] if len(rows) == 1 else torch.cat(rows)]

    def _projected_rows(self, gradients: Sequence[Tensor]) -> Tensor:
        named = zip(self.shapes, gradients)
        return self._rows([self._projections(name, each) for name, each in named])

    def _rows(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns the rows of some samples, given their gradients by parameter."""
        is_lazy, columns = traits(self._device).is_lazy, []
        for each in gradients:
            flat = flattened(each) if is_lazy else each.unsqueeze(1).flatten(1)
            columns.append(flat.to(device=self._device, dtype=self._dtype))
        rows = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        return normalized(rows) if self._normalize else rows

    def _projections(self, name: str, gradients: Tensor) -> Tensor:
        """Returns projections of one parameter's gradients, unless they are these."""
        assert self._projection is not None
        if gradients.shape[1:] == self._projected[name]:
            return gradients
        shape = self.shapes[name] or (1,)
        values = gradients.to(device=self._device, dtype=self._dtype)
        values = values.reshape(len(values), *shape)
        with full_matmul_precision(self._device):
            return self._projection.of(name, [Dense(values)], _BUDGET)

    def count(self, grads: Mapping[str, Tensor], batched: bool) -> int:
        """Returns how many samples these are the gradients of, after checking them."""
        allowed = "a dict from parameter names to per-sample gradients"
        check_type("step(): the gradients", grads, Mapping, allowed)
        if grads.keys() != self.shapes.keys():
            missing = sorted(self.shapes.keys() - grads.keys())
            unknown = sorted(grads.keys() - self.shapes.keys())
            raise ValueError(
                "step() needs the gradients of exactly the parameters that the sampler "
                f"was built with; missing {missing[:5]}, unknown {unknown[:5]}"
            )
        sizes = set()
        for name, shape in self.shapes.items():
            received = tuple(grads[name].shape)
            allowed_shapes = shape, self._projected.get(name, shape)
            is_batch = len(received) >= batched
            if not is_batch or received[batched:] not in allowed_shapes:
                wanted = f"(B, {str(shape)[1:]}" if batched else str(shape)
                raise ValueError(
                    f"step(): the gradient of {name!r} has shape {received}; a "
                    f"parameter of shape {shape} needs {wanted}"
                )
            sizes.add(received[0] if batched else 1)
        if len(sizes) > 1:
            raise ValueError(
                "step(): parameters have gradients of different numbers of samples: "
                f"{sorted(sizes)}"
            )
        return sizes.pop()


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Rows that are formed piece by piece, anew each time they are iterated over."""

    form: Callable[[Sequence[Tensor]], Tensor]
    pieces: Sequence[Sequence[Tensor]]

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.form, self.pieces)


def normalized(rows_BD: Tensor) -> Tensor:
    """Returns rows of norm one; zeros stay, rows without a finite norm become NaN."""
    norms = torch.linalg.vector_norm(rows_BD, dim=1, keepdim=True)
    divisors = torch.where(where_finite(norms), norms.clamp(min=1e-12), torch.nan)
    return rows_BD / divisors
