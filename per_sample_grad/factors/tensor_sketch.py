"""Random sketches of gradients: TensorSketch.

Rows and columns of a parameter are hashed to ``[0, k)`` with random signs, and an entry
goes where the sum of the two hashes modulo k says (Pham and Pagh, KDD 2013). Inner
products of sketches are those of the gradients in expectation over seeds; a gradient of
rank one has the most variance. Gradients are formed for as many samples and columns at
a time as fit a budget, which costs less than Fourier transforms of the factors where
``k`` is larger than the shorter side.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from per_sample_grad.factors import algebra, forms
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.factors.plan import materialized

_PRIME = 2**31 - 1


def sketch(
    name: str,
    shape: tuple[int, ...],
    uses: Sequence[Contribution],
    size: int,
    seed: int,
    budget: int,
) -> torch.Tensor:
    """Returns the sketch of one parameter's gradients, ``(B, k)``.

    The seed draws the hashes, which are the same on every device.
    """
    like, count = forms.float_factor(uses[0]), forms.num_rows(uses[0])
    (of_row, row_signs), (of_column, column_signs) = (
        _hashed(number, size, f"{seed} {name} {axis}", like)
        for number, axis in zip(forms.matrix_shape(shape), ("rows", "columns"))
    )
    # Signed gradients and their places take the memory of gradients, too.
    choice = materialized(uses, shape, count, 1, 1, budget // 4)
    found = like.new_zeros(count, size)
    for low, high in forms.chunks(len(of_column), choice.columns):
        places = (of_row.unsqueeze(1) + of_column[low:high]).remainder(size).flatten()
        signs = row_signs.unsqueeze(1) * column_signs[low:high]
        for start, stop in forms.chunks(count, choice.samples):
            some = algebra.columns_of(uses, shape, (start, stop), low, high) * signs
            found[start:stop].index_add_(1, places, some.flatten(1))
    return found


def _hashed(
    count: int, size: int, seed: str, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where so many indices are hashed to, and their signs."""
    index = torch.arange(count, device=like.device)
    sign = 1 - 2 * _hash(index, f"{seed} sign").remainder(2)
    return _hash(index, f"{seed} bucket").remainder(size), sign.to(like.dtype)


def _hash(index: torch.Tensor, seed: str) -> torch.Tensor:
    """Returns a random cubic polynomial modulo a prime: four-wise independent."""
    generator = random.Random(seed)
    value = torch.zeros_like(index)
    for _ in range(4):
        value = (value * index + generator.randrange(1, _PRIME)).remainder(_PRIME)
    return value
