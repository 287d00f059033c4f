"""Patterns that masks keep: N of every M inputs, or as many inputs for every neuron."""

from __future__ import annotations

import dataclasses
import re

import torch

from rigl_xla.topology import masks
from xla_replica.common.arguments import check_type

CONSTANT_FAN_IN = "constant-fan-in"


@dataclasses.dataclass(frozen=True)
class RowPattern:
    """How a weight is cut into rows with equally many active connections.

    Attributes:
        shape: The weight's shape.
        width: Connections in a row.
        per_row: How many of them are active.
        along_channels: Whether a row lies along the input channels alone, where matrix
            units multiply, as for N:M; or along the kernel too, for constant fan-in.
        transposed: See `outputs_first`.
    """

    shape: tuple[int, ...]
    width: int
    per_row: int
    along_channels: bool
    transposed: int | None = None

    @property
    def num_active(self) -> int:
        """Active connections of the whole weight."""
        size = torch.Size(self.shape).numel()
        return size // self.width * self.per_row

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``(rows, width)`` of a tensor of the weight's size."""
        return self._rows_last(tensor.reshape(self.shape)).reshape(-1, self.width)

    def join(self, rows_RM: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that `cut` was given, of the weight's shape."""
        shape = self._rows_last(torch.empty(self.shape, device="meta")).shape
        tensor = rows_RM.reshape(shape)
        if self.along_channels:
            tensor = tensor.movedim(-1, 1)
        return outputs_first(tensor, self.transposed)

    def best_mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns a mask of the ``per_row`` highest of the weight's scores by row."""
        scores_RM = self.cut(scores)
        counts = torch.full((len(scores_RM),), self.per_row, device=scores.device)
        return self.join(masks.top(scores_RM, counts))

    def _rows_last(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = outputs_first(tensor, self.transposed)
        return tensor.movedim(1, -1) if self.along_channels else tensor


def n_of_m(structure: str | None) -> tuple[int, int] | None:
    """Returns ``(N, M)`` of ``'N:M'``; None for constant fan-in, and without a pattern.

    >>> n_of_m("2:4")
    (2, 4)
    """
    if structure is None or structure == CONSTANT_FAN_IN:
        return None
    check_type("structure", structure, str, "a text like '2:4'")
    match = re.fullmatch(r"(\d+):(\d+)", structure)
    if not match or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(
            f"structure must be {CONSTANT_FAN_IN!r}, or 'N:M' with 0 < N < M like "
            f"'2:4', got {structure!r}"
        )
    return int(match[1]), int(match[2])


def row_pattern(
    structure: str | None,
    name: str,
    shape: tuple[int, ...],
    sparsity: float,
    transposed: int | None = None,
) -> RowPattern | None:
    """Returns how ``structure``, if any, cuts a weight; ValueError if it cannot.

    For constant fan-in, the sparsity is rounded to whole inputs, at least one.
    """
    if structure is None:
        return None
    inputs = outputs_first(torch.empty(shape, device="meta"), transposed)[0]
    pattern, channels = n_of_m(structure), len(inputs)
    if pattern is None:
        per_row = max(1, round((1 - sparsity) * inputs.numel()))
        return RowPattern(shape, inputs.numel(), per_row, False, transposed)
    per_row, width = pattern
    if channels % width:
        raise ValueError(
            f"structure={structure!r} does not fit {name!r} of shape {shape}: its "
            f"{channels} inputs are not a multiple of {width}; put it into exclude="
        )
    return RowPattern(shape, width, per_row, True, transposed)


def outputs_first(tensor: torch.Tensor, transposed: int | None) -> torch.Tensor:
    """Returns ``(out, in / groups, *kernel)`` of a weight, and from there the weight.

    ``transposed`` is the number of groups of a transposed convolution, whose weight is
    ``(in, out / groups, *kernel)``; None for all others, which have outputs first.
    """
    if transposed is None:
        return tensor
    return tensor.unflatten(0, (transposed, -1)).transpose(1, 2).flatten(0, 1)
