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
        transposed: See `outputs_first_shape`.
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
        """Returns ``(rows, width)`` from a tensor of the weight's shape."""
        tensor = outputs_first(tensor, self.transposed)
        if self.along_channels:
            tensor = tensor.movedim(1, -1)
        return tensor.reshape(-1, self.width)

    def join(self, rows_RM: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that `cut` was given."""
        out, channels, *kernel = outputs_first_shape(self.shape, self.transposed)
        if self.along_channels:
            tensor = rows_RM.reshape(out, *kernel, channels).movedim(-1, 1)
        else:
            tensor = rows_RM.reshape(out, channels, *kernel)
        return outputs_first(tensor, self.transposed)

    def best_mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns a mask of the ``per_row`` highest of the weight's scores by row."""
        scores_RM = self.cut(scores)
        counts = torch.full((len(scores_RM),), self.per_row, device=scores.device)
        return self.join(masks.top(scores_RM, counts))

    def random_mask(self, seed: int, name: str) -> torch.Tensor:
        """Returns a bool mask on the CPU with ``per_row`` active in each row."""
        size = torch.Size(self.shape).numel()
        scores_RM = masks.random_scores(seed, name, 0, size).reshape(-1, self.width)
        return self.best_mask(self.join(scores_RM)).contiguous()


def n_of_m(structure: str) -> tuple[int, int] | None:
    """Returns ``(N, M)`` of ``'N:M'``; None for constant fan-in.

    >>> n_of_m("2:4")
    (2, 4)
    """
    check_type("structure", structure, str, "a text like '2:4'")
    if structure == CONSTANT_FAN_IN:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", structure)
    if not match or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(
            f"structure must be {CONSTANT_FAN_IN!r}, or 'N:M' with 0 < N < M like "
            f"'2:4', got {structure!r}"
        )
    return int(match[1]), int(match[2])


def row_pattern(
    structure: str,
    name: str,
    shape: tuple[int, ...],
    sparsity: float,
    transposed: int | None = None,
) -> RowPattern:
    """Returns how ``structure`` cuts a weight; raises ValueError if it cannot.

    For constant fan-in, the sparsity is rounded to whole inputs, at least one.
    """
    pattern = n_of_m(structure)
    _, channels, *kernel = outputs_first_shape(shape, transposed)
    if pattern is None:
        width = torch.Size((channels, *kernel)).numel()
        per_row = max(1, round((1 - sparsity) * width))
        return RowPattern(shape, width, per_row, False, transposed)
    per_row, width = pattern
    if channels % width:
        raise ValueError(
            f"structure={structure!r} does not fit {name!r} of shape {shape}: its "
            f"{channels} inputs are not a multiple of {width}; put it into exclude="
        )
    return RowPattern(shape, width, per_row, True, transposed)


def outputs_first_shape(
    shape: tuple[int, ...], transposed: int | None
) -> tuple[int, ...]:
    """Returns ``(out, in / groups, *kernel)`` of any weight's shape.

    ``transposed`` is the number of groups of a transposed convolution, whose weight is
    ``(in, out / groups, *kernel)``; None for all others, which have outputs first.
    """
    if transposed is None:
        return shape
    return shape[1] * transposed, shape[0] // transposed, *shape[2:]


def outputs_first(tensor: torch.Tensor, transposed: int | None) -> torch.Tensor:
    """Returns a weight as `outputs_first_shape` has it, and from there the weight."""
    if transposed is None:
        return tensor
    first, second, *kernel = tensor.shape
    split = tensor.reshape(transposed, first // transposed, second, *kernel)
    shape = outputs_first_shape(tuple(tensor.shape), transposed)
    return split.transpose(1, 2).reshape(shape)
