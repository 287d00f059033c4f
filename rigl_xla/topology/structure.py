"""Patterns that masks keep: N of every M inputs, or as many inputs for every neuron.

A pattern says how a weight is cut into rows, and how many connections each row has.
"""

from __future__ import annotations

import dataclasses
import re

import torch

from rigl_xla.topology import masks

CONSTANT_FAN_IN = "constant-fan-in"


@dataclasses.dataclass(frozen=True)
class Rows:
    """A weight of this shape, cut into rows of ``width`` with ``per_row`` active.

    Inputs run along the second dimension of a weight, and then along its kernel for
    constant fan-in; groups of N:M lie along the input channels, where matrix units
    multiply. A transposed convolution's weight, of so many groups, is turned to have
    outputs first.
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
        """``(rows, width)`` from a tensor of the weight's shape."""
        tensor = outputs_first(tensor, self.transposed)
        if self.along_channels:
            tensor = tensor.movedim(1, -1)
        return tensor.reshape(-1, self.width)

    def join(self, rows_RM: torch.Tensor) -> torch.Tensor:
        """What `cut` was given."""
        out, channels, *kernel = outputs_first_shape(self.shape, self.transposed)
        if self.along_channels:
            tensor = rows_RM.reshape(out, *kernel, channels).movedim(-1, 1)
        else:
            tensor = rows_RM.reshape(out, channels, *kernel)
        return outputs_first(tensor, self.transposed)

    def random_mask(self, seed: int, name: str) -> torch.Tensor:
        """bool of the weight's shape on the CPU, ``per_row`` active in each row."""
        size = torch.Size(self.shape).numel()
        scores = masks.random_scores(seed, name, 0, size).reshape(-1, self.width)
        counts = torch.full((len(scores),), self.per_row)
        return self.join(masks.top(scores, counts)).contiguous()


def outputs_first_shape(
    shape: tuple[int, ...], transposed: int | None
) -> tuple[int, ...]:
    """``(out, in / groups, *kernel)`` of any weight's shape.

    Args:
        shape: Of the weight.
        transposed: Groups of a transposed convolution, whose weight is ``(in, out /
            groups, *kernel)``; None for all others, which have outputs first.
    """
    if transposed is None:
        return shape
    return shape[1] * transposed, shape[0] // transposed, *shape[2:]


def outputs_first(tensor: torch.Tensor, transposed: int | None) -> torch.Tensor:
    """A weight as `outputs_first_shape` has it; from there, the weight again."""
    if transposed is None:
        return tensor
    first, second, *kernel = tensor.shape
    split = tensor.reshape(transposed, first // transposed, second, *kernel)
    shape = outputs_first_shape(tuple(tensor.shape), transposed)
    return split.transpose(1, 2).reshape(shape)


def n_of_m(structure: str) -> tuple[int, int] | None:
    """``(N, M)`` of ``'N:M'``; None for constant fan-in.

    Raises:
        ValueError, TypeError: It is neither.

    >>> n_of_m("2:4")
    (2, 4)
    """
    if not isinstance(structure, str):
        raise TypeError(f"structure is {structure!r}; it must be a text like '2:4'")
    if structure == CONSTANT_FAN_IN:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", structure)
    if not match or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(
            f"structure={structure!r} is not known; allowed are {CONSTANT_FAN_IN!r} "
            "and 'N:M' with 0 < N < M, like '2:4'"
        )
    return int(match[1]), int(match[2])


def rows_of(
    structure: str,
    name: str,
    shape: tuple[int, ...],
    sparsity: float,
    transposed: int | None = None,
) -> Rows:
    """How ``structure`` cuts a weight.

    Args:
        structure: ``'N:M'`` or ``'constant-fan-in'``.
        name: Of the parameter, for errors.
        shape: Of the weight.
        sparsity: For constant fan-in; rounded to whole inputs, at least one.
        transposed: Groups of a transposed convolution, see `outputs_first_shape`.

    Raises:
        ValueError: The inputs are no multiple of M.
    """
    pattern = n_of_m(structure)
    _, channels, *kernel = outputs_first_shape(shape, transposed)
    if pattern is None:
        width = torch.Size((channels, *kernel)).numel()
        per_row = max(1, round((1 - sparsity) * width))
        return Rows(shape, width, per_row, False, transposed)
    per_row, width = pattern
    if channels % width:
        raise ValueError(
            f"structure={structure!r} does not fit {name!r} of shape {shape}: its "
            f"{channels} inputs are no multiple of {width}; put it into exclude="
        )
    return Rows(shape, width, per_row, True, transposed)
