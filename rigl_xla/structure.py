"""Patterns that masks keep: N of every M inputs, or as many inputs for every neuron.

A pattern says how a weight is cut into rows, and how many connections each row has.
"""

from __future__ import annotations

import dataclasses
import re

import torch

from rigl_xla import masks

CONSTANT_FAN_IN = "constant-fan-in"


@dataclasses.dataclass(frozen=True)
class Rows:
    """A weight of this shape, cut into rows of ``width`` with ``per_row`` active.

    Inputs run along the second dimension of a weight, and then along its kernel for
    constant fan-in; groups of N:M lie along the input channels, where matrix units
    multiply.
    """

    shape: tuple[int, ...]
    width: int
    per_row: int
    along_channels: bool

    @property
    def num_active(self) -> int:
        """Active connections of the whole weight."""
        size = torch.Size(self.shape).numel()
        return size // self.width * self.per_row

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """``(rows, width)`` from a tensor of the weight's shape."""
        if self.along_channels:
            tensor = tensor.movedim(1, -1)
        return tensor.reshape(-1, self.width)

    def join(self, rows_RM: torch.Tensor) -> torch.Tensor:
        """What `cut` was given."""
        if not self.along_channels:
            return rows_RM.reshape(self.shape)
        out, channels, *kernel = self.shape
        return rows_RM.reshape(out, *kernel, channels).movedim(-1, 1)

    def random_mask(self, seed: int, name: str) -> torch.Tensor:
        """bool of the weight's shape on the CPU, ``per_row`` active in each row."""
        size = torch.Size(self.shape).numel()
        scores = masks.random_scores(seed, name, 0, size).reshape(-1, self.width)
        counts = torch.full((len(scores),), self.per_row)
        return self.join(masks.top(scores, counts)).contiguous()


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


def rows_of(structure: str, name: str, shape: tuple[int, ...], sparsity: float) -> Rows:
    """How ``structure`` cuts a weight.

    Args:
        structure: ``'N:M'`` or ``'constant-fan-in'``.
        name: Of the parameter, for errors.
        shape: ``(out, in)`` or ``(out, in, *kernel)``.
        sparsity: For constant fan-in; rounded to whole inputs, at least one.

    Raises:
        ValueError: The inputs are no multiple of M.
    """
    pattern = n_of_m(structure)
    if pattern is None:
        width = torch.Size(shape[1:]).numel()
        return Rows(shape, width, max(1, round((1 - sparsity) * width)), False)
    per_row, width = pattern
    if shape[1] % width:
        raise ValueError(
            f"structure={structure!r} does not fit {name!r} of shape {shape}: its "
            f"{shape[1]} inputs are no multiple of {width}; put it into exclude="
        )
    return Rows(shape, width, per_row, True)
