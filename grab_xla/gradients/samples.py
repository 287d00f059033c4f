"""Every sample's gradient, or its projection, and the rows that are balanced of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from grab_xla.gradients.groups import of_another_model
from grab_xla.gradients.row_copies import flattened
from grab_xla.random_projections import Projection as FormedProjection
from per_sample_grad import Capture, Factors, Projection
from xla_replica import traits, where_finite
from xla_replica.common.arguments import check_type

# How many numbers are formed at once: 4 and 64 MiB in float32. Smaller pieces would
# take notable time in calls.
PIECE_ON_HOST, PIECE_ON_DEVICE = 2**20, 2**24


def sample_gradients(
    capture: Capture,
    losses: Tensor,
    reduction: Literal["mean", "sum"],
    projection: Projection | None = None,
    from_samples: bool = False,
) -> dict[str, Tensor]:
    """Runs the backward pass of the mean loss, or of the sum.

    Args:
        capture: The recorded forward pass.
        losses: ``(B,)``.
        reduction: ``"mean"`` or ``"sum"``.
        projection: Gradients are projected by this.
        from_samples: ``.grad`` gets the mean, or the sum, of gradients of samples, if
            these are not projected.

    Returns:
        What is balanced of every sample, ``(B, ...)`` by name.

    Raises:
        RuntimeError: The losses do not depend on the parameters.
        PerSampleError: As for `Capture.backward`.
    """
    later: list[Factors] = []

    def rows(factors: Factors) -> dict[str, Tensor]:
        # What is formed at the end is not in memory together with activations.
        if factors.compression > 1:
            later.append(factors)
            return {}
        return factors.materialize()

    if projection is not None:
        found = capture.project(losses, projection, accumulate=reduction)
    else:
        from_samples = from_samples and len(losses) > 0
        accumulate = None if from_samples else reduction
        found = capture.stream(losses, rows, accumulate=accumulate)
        while later:
            found |= later.pop().materialize()
        if from_samples:
            sums = {name: getattr(each, reduction)(0) for name, each in found.items()}
            capture.add_gradients(sums)
    if capture.unused == capture.params.keys():
        raise of_another_model()
    return found


class GradientMatrix:
    """Turns the gradients of a step into rows ``(B, K)``, parameter after parameter.

    Rows are gradients or random projections of them, or either of norm one. A whole
    copy of the gradients is made only where the balance needs it.

    Args:
        shapes: Those of gradients, by name, in the sequence of the columns.
        projection: The projection, which may be that of ``kind="none"``.
        normalize: Whether rows are divided by their norms.
        dtype: The dtype of the rows.
        device: The device of the rows.
        remark: Ends the error about wrong shapes.

    Attributes:
        shapes: As they were given.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        projection: FormedProjection,
        normalize: bool,
        dtype: torch.dtype,
        device: torch.device,
        remark: str = "",
    ) -> None:
        self.shapes = shapes
        self._projection, self._normalize = projection, normalize
        self._dtype, self._device, self._remark = dtype, device, remark
        self._projects = bool(projection.tables)

    def pieces(
        self, grads: Mapping[str, Tensor] | Tensor, multiple: int | None
    ) -> Iterable[Tensor]:
        """Returns the rows, some after the others, each time they are iterated over.

        All come at once where gradients are one matrix, and on a lazy backend, where
        every piece would be a part of the program. A projection is small, but what is
        formed on the way to it is not; so it is formed in pieces and comes at once.
        What comes at once is formed once; several pieces are formed every time.

        Args:
            grads: ``(B, columns)``, or ``(B, *shape)`` for every parameter.
            multiple: A piece has a multiple of so many rows, but for the last one. None
                means all rows.
        """
        if isinstance(grads, Tensor):
            values = [grads]
        else:
            values = [grads[name].detach() for name in self.shapes]
        pieces: list[Sequence[Tensor]] = [values]
        kind, copies = traits(self._device), 1
        if self._projects:
            multiple, copies = 1, 4
        is_whole = multiple is None or kind.is_lazy or isinstance(grads, Tensor)
        if not is_whole:
            numbers = PIECE_ON_HOST if kind.is_host else PIECE_ON_DEVICE
            row = copies * multiple * self._projection.num_inputs
            size = max(1, numbers // row) * multiple
            pieces = list(zip(*(value.split(size) for value in values)))
        if len(pieces) > 1 and not self._projects:
            return _Formed(self._rows, pieces)
        parts = [self._rows(columns) for columns in pieces]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return [rows]

    def _rows(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns the rows of some samples, given their gradients by parameter."""
        is_lazy = traits(self._device).is_lazy
        columns = []
        for each in gradients:
            flat = flattened(each) if is_lazy else each.unsqueeze(1).flatten(1)
            columns.append(flat.to(device=self._device, dtype=self._dtype))
        if self._projects:
            rows = self._projection(*columns)
        else:
            rows = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        return normalized(rows) if self._normalize else rows

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
            if received[batched:] != shape or len(received) != len(shape) + batched:
                wanted = f"(B, {str(shape)[1:]}" if batched else str(shape)
                raise ValueError(
                    f"step(): the gradient of {name!r} has shape {received}; a "
                    f"parameter of shape {shape} needs {wanted}{self._remark}"
                )
            sizes.add(received[0] if batched else 1)
        if len(sizes) > 1:
            raise ValueError(
                "step(): parameters have gradients of different numbers of samples: "
                f"{sorted(sizes)}"
            )
        return sizes.pop()


@dataclasses.dataclass(frozen=True)
class _Formed:
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
