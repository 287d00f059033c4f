"""Random sketches of gradients from their factors: TensorSketch.

Rows and columns of a parameter are hashed to ``[0, k)`` with random signs, and an entry
goes where the sum of the two hashes modulo k says (Pham and Pagh, KDD 2013): the count
sketch of an outer product is then the circular convolution of the factors' count
sketches, so it costs ``T (p + q) k`` and no gradient is formed. Convolutions are
products of Fourier transforms; those are matrix products here, since a lazy backend
runs an FFT on the host. Inner products of sketches are those of the gradients in
expectation over seeds; a gradient of rank one has the most variance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from per_sample_grad.contributions import (
    Contribution,
    Dense,
    Lookup,
    Outer,
    matrix_shape,
)

_PRIME = 2**31 - 1


class Table:
    """Signed Fourier transforms of where each of ``count`` indices is hashed to.

    Attributes:
        cosines: ``(count, F)``, ``F = k // 2 + 1``.
        sines: ``(count, F)``.
    """

    def __init__(
        self,
        count: int,
        size: int,
        seed: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        index = torch.arange(count, device=device)
        bucket = _hash(index, f"{seed} bucket").remainder(size)
        sign = 1 - 2 * _hash(index, f"{seed} sign").remainder(2)
        frequency = torch.arange(size // 2 + 1, device=device)
        # Whole turns are taken off as integers.
        turns = (bucket.unsqueeze(1) * frequency).remainder(size)
        angles = turns.to(dtype) * (2 * math.pi / size)
        signs = sign.to(dtype).unsqueeze(1)
        self.cosines = signs * angles.cos()
        self.sines = signs * angles.sin()


def sketch(
    merged: Sequence[tuple[str, tuple[int, ...], Sequence[Contribution]]],
    num_samples: int,
    size: int,
    seed: int,
    budget: int,
) -> torch.Tensor | None:
    """``(B, k)``: the sum of all parameters' sketches; None where nothing contributes.

    Args:
        merged: Name, shape and merged uses of each parameter.
        num_samples: B.
        size: k.
        seed: Draws the hashes, alike on every device.
        budget: Bytes of temporaries; chunks of samples.
    """
    cosines, sines = [], []
    for name, shape, parts in merged:
        if not parts:
            continue
        rows, columns = matrix_shape(shape)
        dtype, device = _like(parts[0])
        of_rows = Table(rows, size, f"{seed} {name} rows", dtype, device)
        of_columns = Table(columns, size, f"{seed} {name} columns", dtype, device)
        for part in parts:
            real, imaginary = _transform(part, shape, of_rows, of_columns, budget)
            cosines.append(real)
            sines.append(imaginary)
    if not cosines:
        return None
    return _inverse(_total(cosines), _total(sines), size)


def _transform(
    part: Contribution,
    shape: Sequence[int],
    of_rows: Table,
    of_columns: Table,
    budget: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Fourier transform of every sample's sketch: two of ``(N, F)``."""
    rows, columns = matrix_shape(shape)
    frequencies = of_rows.cosines.shape[1]
    match part:
        case Outer(left, right):
            first, second = left, right
            elements = left.shape[1] * left.shape[2] * frequencies
        case Lookup(index, values):
            first, second = index, values
            elements = index.shape[1] * frequencies
        case Dense(values):
            first = values.reshape(len(values), rows, columns).transpose(1, 2)
            second, elements = first, columns * frequencies
    pieces = zip(*_split(first, second, elements, budget))
    real, imaginary = [], []
    for piece, other in pieces:
        a, b = _left(part, piece, of_rows)
        c, d = _right(part, other, of_columns)
        real.append((a * c - b * d).flatten(1, -2).sum(1))
        imaginary.append((a * d + b * c).flatten(1, -2).sum(1))
    return torch.cat(real), torch.cat(imaginary)


def _left(
    part: Contribution, factor: torch.Tensor, table: Table
) -> tuple[torch.Tensor, torch.Tensor]:
    match part:
        case Outer(left, _):
            by_group = (left.shape[1], left.shape[3])
            cosines = table.cosines.unflatten(0, by_group)
            return factor @ cosines, factor @ table.sines.unflatten(0, by_group)
        case Lookup():
            flat = factor.flatten().long()
            shape = (*factor.shape, -1)
            cosines = table.cosines.index_select(0, flat).reshape(shape)
            return cosines, table.sines.index_select(0, flat).reshape(shape)
        case Dense():
            return factor @ table.cosines, factor @ table.sines


def _right(
    part: Contribution, factor: torch.Tensor, table: Table
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(part, Dense):
        return table.cosines, table.sines  # (columns, F): summed over columns
    return factor @ table.cosines, factor @ table.sines


def _split(
    first: torch.Tensor, second: torch.Tensor, elements: int, budget: int
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Chunks of samples whose transforms, ``elements`` each, fit the budget."""
    size = max(1, budget // (6 * elements * second.element_size()))
    return first.split(size), second.split(size)


def _inverse(cosines: torch.Tensor, sines: torch.Tensor, size: int) -> torch.Tensor:
    """From ``(N, F)`` sums of cosines and sines to the real ``(N, k)``."""
    device, dtype = cosines.device, cosines.dtype
    frequency = torch.arange(cosines.shape[1], device=device)
    position = torch.arange(size, device=device)
    turns = (frequency.unsqueeze(1) * position).remainder(size)
    angles = turns.to(dtype) * (2 * math.pi / size)
    # Every frequency but 0 and k / 2 stands for its mirror image too.
    alone = (2 * frequency).remainder(size) == 0
    weight = (2 - alone.to(dtype)).unsqueeze(1) / size
    return cosines @ (weight * angles.cos()) + sines @ (weight * angles.sin())


def _hash(index: torch.Tensor, seed: str) -> torch.Tensor:
    """A random cubic polynomial modulo a prime: four-wise independent."""
    generator = random.Random(seed)
    value = torch.zeros_like(index)
    for _ in range(4):
        value = (value * index + generator.randrange(1, _PRIME)).remainder(_PRIME)
    return value


def _like(part: Contribution) -> tuple[torch.dtype, torch.device]:
    match part:
        case Outer(left, _):
            return left.dtype, left.device
        case Lookup(_, values) | Dense(values):
            return values.dtype, values.device


def _total(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
