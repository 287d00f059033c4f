"""Random sketches of gradients from their factors: TensorSketch.

Rows and columns of a parameter are hashed to ``[0, k)`` with random signs, and an entry
goes where the sum of the two hashes modulo k says (Pham and Pagh, KDD 2013): the count
sketch of an outer product is then the circular convolution of the factors' count
sketches, so it costs ``T (p + q) k`` and no gradient is formed. Convolutions are
products of Fourier transforms; those of factors are matrix products here, and on a lazy
backend, which runs an FFT on the host, so is the one back. Inner products of sketches
are those of the gradients in expectation over seeds; a gradient of rank one has the
most variance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from per_sample_grad.factors.algebra import summed
from per_sample_grad.factors.forms import (
    LAZY,
    Contribution,
    Dense,
    Lookup,
    Outer,
    Windows,
    chunks,
    device_of,
    dtype_of,
    matrix_shape,
    num_rows,
    part,
    unfolded_elements,
)

_PRIME = 2**31 - 1


class Table:
    """Signed Fourier transforms of where each of ``count`` indices is hashed to.

    Attributes:
        cosines: ``(count, f)``: the frequencies asked for, of ``F = k // 2 + 1``.
        sines: ``(count, f)``.
    """

    def __init__(
        self,
        count: int,
        size: int,
        seed: str,
        frequencies: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        index = torch.arange(count, device=device)
        bucket = _hash(index, f"{seed} bucket").remainder(size)
        sign = 1 - 2 * _hash(index, f"{seed} sign").remainder(2)
        frequency = torch.arange(*frequencies, device=device)
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
        budget: Bytes of temporaries, tables included.
    """
    cosines, sines = [], []
    for name, shape, uses in merged:
        if not uses:
            continue
        found = [
            _some_frequencies(name, shape, uses, size, seed, low, high, budget)
            for low, high in chunks(size // 2 + 1, _frequencies(shape, uses, budget))
        ]
        cosines.append(torch.cat([real for real, _ in found], 1))
        sines.append(torch.cat([imaginary for _, imaginary in found], 1))
    if not cosines:
        return None
    return _inverse(summed(cosines), summed(sines), size, budget)


def _frequencies(
    shape: Sequence[int], uses: Sequence[Contribution], budget: int
) -> int:
    """How many at a time: half of the budget is for the tables, integers first."""
    entries = sum(matrix_shape(shape)) * (2 * dtype_of(uses[0]).itemsize + 16)
    return max(1, budget // (2 * entries))


def _some_frequencies(
    name: str,
    shape: tuple[int, ...],
    uses: Sequence[Contribution],
    size: int,
    seed: int,
    low: int,
    high: int,
    budget: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies ``[low, high)`` of a parameter's transforms: two of ``(N, f)``."""
    rows, columns = matrix_shape(shape)
    like = dtype_of(uses[0]), device_of(uses[0])
    of_rows = Table(rows, size, f"{seed} {name} rows", (low, high), *like)
    of_columns = Table(columns, size, f"{seed} {name} columns", (low, high), *like)
    pairs = [_transform(use, shape, of_rows, of_columns, budget // 2) for use in uses]
    return summed([pair[0] for pair in pairs]), summed([pair[1] for pair in pairs])


def _transform(
    use: Contribution,
    shape: Sequence[int],
    of_rows: Table,
    of_columns: Table,
    budget: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Fourier transform of every sample's sketch: two of ``(N, f)``."""
    rows, columns = matrix_shape(shape)
    frequencies = of_rows.cosines.shape[1]
    match use:
        case Outer() | Windows():
            elements = use.groups * use.positions * frequencies
        case Lookup():
            elements = use.positions * frequencies
        case Dense():
            elements = columns * frequencies
    each = (6 * elements + unfolded_elements(use)) * dtype_of(use).itemsize
    real, imaginary = [], []
    for start, stop in chunks(num_rows(use), max(1, budget // each)):
        match part(use, start, stop):
            case Outer(first, second):
                pass
            case Lookup(first, second):
                pass
            case Dense(values):
                first = values.reshape(len(values), rows, columns).transpose(1, 2)
                second = first
        a, b = _left(use, first, of_rows)
        c, d = _right(use, second, of_columns)
        real.append((a * c - b * d).flatten(1, -2).sum(1))
        imaginary.append((a * d + b * c).flatten(1, -2).sum(1))
    return torch.cat(real), torch.cat(imaginary)


def _left(
    use: Contribution, factor: torch.Tensor, table: Table
) -> tuple[torch.Tensor, torch.Tensor]:
    match use:
        case Outer(left) | Windows(left):
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
    use: Contribution, factor: torch.Tensor, table: Table
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(use, Dense):
        return table.cosines, table.sines  # (columns, F): summed over columns
    return factor @ table.cosines, factor @ table.sines


def _inverse(
    cosines: torch.Tensor, sines: torch.Tensor, size: int, budget: int
) -> torch.Tensor:
    """From ``(N, F)`` sums of cosines and sines to the real ``(N, k)``."""
    device, dtype = cosines.device, cosines.dtype
    if device.type not in LAZY:
        return torch.fft.irfft(torch.complex(cosines, -sines), size)
    position = torch.arange(size, device=device)
    # Integers, angles, and the two functions of them.
    each = size * (16 + 3 * dtype.itemsize)
    terms = []
    for low, high in chunks(cosines.shape[1], max(1, budget // each)):
        frequency = torch.arange(low, high, device=device)
        turns = (frequency.unsqueeze(1) * position).remainder(size)
        angles = turns.to(dtype) * (2 * math.pi / size)
        # Every frequency but 0 and k / 2 stands for its mirror image too.
        alone = (2 * frequency).remainder(size) == 0
        weight = (2 - alone.to(dtype)).unsqueeze(1) / size
        terms.append(cosines[:, low:high] @ (weight * angles.cos()))
        terms.append(sines[:, low:high] @ (weight * angles.sin()))
    return summed(terms)


def _hash(index: torch.Tensor, seed: str) -> torch.Tensor:
    """A random cubic polynomial modulo a prime: four-wise independent."""
    generator = random.Random(seed)
    value = torch.zeros_like(index)
    for _ in range(4):
        value = (value * index + generator.randrange(1, _PRIME)).remainder(_PRIME)
    return value
