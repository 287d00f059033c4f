"""Random sketches of gradients from their factors: TensorSketch.

Rows and columns of a parameter are hashed to ``[0, k)`` with random signs, and an entry
goes where the sum of the two hashes modulo k says (Pham and Pagh, KDD 2013): the count
sketch of an outer product is then the circular convolution of the factors' count
sketches, so it costs ``T (p + q) k`` and no gradient is formed. Convolutions are
products of Fourier transforms. Those of the factors are matrix products here, and so is
the transform back on a lazy device, which would run an FFT on the host. Inner products
of sketches are those of the gradients in expectation over seeds; a gradient of rank one
has the most variance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import (
    Contribution,
    Dense,
    Lookup,
    Outer,
    Windows,
)
from xla_replica import traits

_PRIME = 2**31 - 1
# The cosines and the sines of some frequencies: real and imaginary parts.
_Waves = tuple[torch.Tensor, torch.Tensor]


def sketch(
    merged: Sequence[tuple[str, tuple[int, ...], Sequence[Contribution]]],
    size: int,
    seed: int,
    budget: int,
) -> torch.Tensor | None:
    """Returns the sum of all parameters' sketches, ``(B, k)``; None without any use.

    ``merged`` has name, shape and uses of each parameter, the budget includes tables,
    and the seed draws the hashes, which are the same on every device.
    """
    cosines, sines = [], []
    for name, shape, uses in merged:
        if not uses:
            continue
        like = forms.float_factor(uses[0])
        # Half of the budget is for the tables, which are made from integers.
        entries = sum(forms.matrix_shape(shape)) * (2 * like.dtype.itemsize + 16)
        found = []
        for low, high in forms.chunks(size // 2 + 1, max(1, budget // (2 * entries))):
            frequencies = torch.arange(low, high, device=like.device)
            of_rows, of_columns = (
                _table(count, size, f"{seed} {name} {axis}", frequencies, like.dtype)
                for count, axis in zip(forms.matrix_shape(shape), ("rows", "columns"))
            )
            pairs = [
                _transform(use, shape, of_rows, of_columns, budget // 2) for use in uses
            ]
            found.append([forms.summed(terms) for terms in zip(*pairs)])
        cosines.append(torch.cat([real for real, _ in found], 1))
        sines.append(torch.cat([imaginary for _, imaginary in found], 1))
    if not cosines:
        return None
    return _inverse(forms.summed(cosines), forms.summed(sines), size, budget)


def _table(
    count: int, size: int, seed: str, frequencies: torch.Tensor, dtype: torch.dtype
) -> _Waves:
    """Returns the signed transforms of where indices are hashed to, ``(count, f)``."""
    index = torch.arange(count, device=frequencies.device)
    bucket = _hash(index, f"{seed} bucket").remainder(size)
    sign = 1 - 2 * _hash(index, f"{seed} sign").remainder(2)
    signs = sign.to(dtype).unsqueeze(1)
    cosines, sines = _waves(bucket, frequencies, size, dtype)
    return signs * cosines, signs * sines


def _waves(
    rows: torch.Tensor, columns: torch.Tensor, size: int, dtype: torch.dtype
) -> _Waves:
    """Returns cosine and sine of ``2 π row column / size`` for every pair."""
    # Whole turns are taken off as integers, which are exact.
    turns = (rows.unsqueeze(1) * columns).remainder(size)
    angles = turns.to(dtype) * (2 * math.pi / size)
    return angles.cos(), angles.sin()


def _transform(
    use: Contribution,
    shape: Sequence[int],
    of_rows: _Waves,
    of_columns: _Waves,
    budget: int,
) -> _Waves:
    """Returns the Fourier transform of every sample's sketch: two of ``(N, f)``."""
    rows, columns = forms.matrix_shape(shape)
    frequencies = of_rows[0].shape[1]
    match use:
        case Outer() | Windows():
            elements = use.groups * use.positions * frequencies
        case Lookup():
            elements = use.positions * frequencies
        case Dense():
            elements = columns * frequencies
    itemsize = forms.float_factor(use).dtype.itemsize
    each = (6 * elements + forms.unfolded(use) * columns) * itemsize
    real, imaginary = [], []
    for start, stop in forms.chunks(forms.num_rows(use), max(1, budget // each)):
        match forms.part(use, start, stop):
            case Outer(left, right):
                by_group = (left.shape[1], left.shape[3])
                a, b = (left @ wave.unflatten(0, by_group) for wave in of_rows)
                c, d = (right @ wave for wave in of_columns)
            case Lookup(index, values):
                flat, by_sample = index.flatten().long(), (*index.shape, -1)
                a, b = (w.index_select(0, flat).reshape(by_sample) for w in of_rows)
                c, d = (values @ wave for wave in of_columns)
            case Dense(values):
                matrix = values.reshape(len(values), rows, columns).transpose(1, 2)
                a, b = (matrix @ wave for wave in of_rows)
                c, d = of_columns  # summed over columns below
        real.append((a * c - b * d).flatten(1, -2).sum(1))
        imaginary.append((a * d + b * c).flatten(1, -2).sum(1))
    return torch.cat(real), torch.cat(imaginary)


def _inverse(
    cosines: torch.Tensor, sines: torch.Tensor, size: int, budget: int
) -> torch.Tensor:
    """Returns the real ``(N, k)`` of ``(N, F)`` sums of cosines and sines."""
    device, dtype = cosines.device, cosines.dtype
    if not traits(device).is_lazy:
        return torch.fft.irfft(torch.complex(cosines, -sines), size)
    position = torch.arange(size, device=device)
    # Integers, angles, and the two functions of them.
    each = size * (16 + 3 * dtype.itemsize)
    terms = []
    for low, high in forms.chunks(cosines.shape[1], max(1, budget // each)):
        frequency = torch.arange(low, high, device=device)
        cosine, sine = _waves(frequency, position, size, dtype)
        # Every frequency but 0 and k / 2 counts for its mirror image too.
        alone = (2 * frequency).remainder(size) == 0
        weight = (2 - alone.to(dtype)).unsqueeze(1) / size
        terms.append(cosines[:, low:high] @ (weight * cosine))
        terms.append(sines[:, low:high] @ (weight * sine))
    return forms.summed(terms)


def _hash(index: torch.Tensor, seed: str) -> torch.Tensor:
    """Returns a random cubic polynomial modulo a prime: four-wise independent."""
    generator = random.Random(seed)
    value = torch.zeros_like(index)
    for _ in range(4):
        value = (value * index + generator.randrange(1, _PRIME)).remainder(_PRIME)
    return value
