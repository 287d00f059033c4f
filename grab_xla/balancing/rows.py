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

import torch
from torch import Tensor

from per_sample_grad import Factors


class UnformedRows(abc.ABC):
    """Rows that are known by their inner products and weighted sums.

    ``rows @ vectors.T``, ``rows - centre`` and ``rows * weights`` are what they are of
    a matrix, given a centre ``(1, D)`` and weights ``(R, 1)``.
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

    def squared_norms(self) -> Tensor:
        """Returns the rows' squared norms, ``(R,)``."""
        return torch.diagonal(self.gram())

    def __sub__(self, centre_1D: Tensor) -> UnformedRows:
        return Shifted(self, centre_1D)

    def __mul__(self, weights_R1: Tensor) -> UnformedRows:
        return Scaled(self, weights_R1)


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

    def squared_norms(self) -> Tensor:
        parts = [factors.norms(squared=True) for factors in self.factors]
        squares = (rows.square().sum(1) for rows in self.formed.values())
        return sum(squares, sum(parts))

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


@dataclasses.dataclass(frozen=True)
class Shifted(UnformedRows):
    """Rows less a centre, ``(1, D)``."""

    rows: UnformedRows
    centre_1D: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def gram(self) -> Tensor:
        with_centre = self.rows @ self.centre_1D.T
        gram = self.rows.gram() - with_centre - with_centre.T
        return gram + self.centre_1D @ self.centre_1D.T

    def __matmul__(self, vectors_DV: Tensor) -> Tensor:
        return self.rows @ vectors_DV - self.centre_1D @ vectors_DV

    def squared_norms(self) -> Tensor:
        """Returns those of the rows, which tell what is finite."""
        return self.rows.squared_norms()

    def add_(self, sums_VD: Tensor, weights_VR: Tensor) -> None:
        self.rows.add_(sums_VD, weights_VR)
        sums_VD.addcmul_(weights_VR.sum(1, keepdim=True), self.centre_1D, value=-1)


@dataclasses.dataclass(frozen=True)
class Scaled(UnformedRows):
    """Rows times their weights, ``(R, 1)``."""

    rows: UnformedRows
    weights_R1: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __matmul__(self, vectors_DV: Tensor) -> Tensor:
        return self.rows @ vectors_DV * self.weights_R1

    def gram(self) -> Tensor:
        return self.rows.gram() * self.weights_R1.T * self.weights_R1

    def squared_norms(self) -> Tensor:
        return self.rows.squared_norms() * self.weights_R1[:, 0].square()

    def add_(self, sums_VD: Tensor, weights_VR: Tensor) -> None:
        self.rows.add_(sums_VD, weights_VR * self.weights_R1.T)


Rows = Tensor | UnformedRows


def flat(rows: Tensor) -> Tensor:
    """Returns ``(R, *)`` as ``(R, n)``, without a copy."""
    return rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
