"""The vectors of a step as rows of a matrix that need not be formed.

All that most balancers ask of a step's gradients is inner products, with one another
and with a few vectors, and weighted sums of them. Where a layer is applied once to a
sample, its weight's gradient is an outer product of p and q numbers, and all of that
follows from these: ``<x_i y_i', x_j y_j'> = <x_i, x_j> <y_i, y_j>``, ``<V, x_i y_i'> =
x_i' V y_i``, and a weighted sum is a product of matrices. The p q numbers of a gradient
are then never formed.

Axes: R rows, D columns, V vectors.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from per_sample_grad import Factors


class UnformedRows(abc.ABC):
    """Rows that are known by their inner products and weighted sums.

    ``rows @ vectors.T`` is what it is of a matrix.
    """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __matmul__(self, vectors_DV: Tensor) -> Tensor:
        """Returns inner products with vectors, ``(R, V)``."""

    @abc.abstractmethod
    def gram(self) -> Tensor:
        """Returns inner products of the rows, ``(R, R)``."""

    @abc.abstractmethod
    def add_(self, sums_VD: Tensor, weights_VR: Tensor) -> None:
        """Adds weighted sums of the rows; rows of weight zero need not be finite."""


@dataclasses.dataclass(frozen=True)
class FactoredRows(UnformedRows):
    """Rows some of whose columns are known by their factors.

    Attributes:
        shapes: The shapes of the parameters, by name, in the sequence of the columns.
        factors: The factors of some parameters.
        formed: ``(R, n)``, the gradients of the other ones, by name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    factors: Sequence[Factors]
    formed: Mapping[str, Tensor]

    def __len__(self) -> int:
        held = [*self.factors, *self.formed.values()]
        return len(held[0])

    def gram(self) -> Tensor:
        parts = [factors.gram() for factors in self.factors]
        return sum((rows @ rows.T for rows in self.formed.values()), sum(parts))

    def __matmul__(self, vectors_DV: Tensor) -> Tensor:
        own = self._by_name(vectors_DV.T)
        parts = [
            factors.dot({name: own[name] for name in factors.shapes})
            for factors in self.factors
        ]
        formed = (rows @ flat(own[name]).T for name, rows in self.formed.items())
        return sum(formed, sum(parts))

    def add_(self, sums_VD: Tensor, weights_VR: Tensor) -> None:
        own = self._by_name(sums_VD)
        for factors in self.factors:
            factors.add_weighted_sum_(own, weights_VR)
        for name, rows in self.formed.items():
            flat(own[name]).addmm_(weights_VR, rows)

    def _by_name(self, vectors_VD: Tensor) -> dict[str, Tensor]:
        """Returns views of vectors, ``(V, *shape)`` by name."""
        parts = vectors_VD.split([math.prod(s) for s in self.shapes.values()], dim=1)
        return {
            name: part.view(len(part), *shape)
            for (name, shape), part in zip(self.shapes.items(), parts)
        }


Rows = Tensor | UnformedRows


def flat(rows: Tensor) -> Tensor:
    """Returns ``(R, *)`` as ``(R, n)``, without a copy."""
    return rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
