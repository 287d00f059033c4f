"""Every sample's gradient as factors, and the answers that are computed from them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch

from per_sample_grad.factors import algebra, forms, products
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.factors.plan import (
    QUANTITIES,
    Choice,
    Method,
    Plan,
    Quantity,
    choose,
    samples_of_gradients,
)
from per_sample_grad.factors.sketch import sketch
from xla_replica import full_matmul_precision

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _in_full_precision(
    method: Callable[Concatenate[Factors, _P], _T],
) -> Callable[Concatenate[Factors, _P], _T]:
    """Whatever autocast the caller is in: sums are in float32 or wider, no graph."""

    @functools.wraps(method)
    def answer(self: Factors, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with forms.full_precision(self.losses.device):
            return method(self, *args, **kwargs)

    return answer


class Factors:
    """The gradients of B losses, none of which is formed before it is asked for.

    Made by `Capture.backward`. Every answer is in float32 or wider and has no graph.
    On a lazy device nothing is computed before it is fetched: ask for all the answers
    first, then fetch them together.

    Attributes:
        shapes: The shape of each parameter, by name.
        losses: ``(B,)``.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        merged: Mapping[str, Sequence[Contribution]],
        losses: torch.Tensor,
        *,
        method: Method,
        budget: int,
    ) -> None:
        self.shapes = dict(shapes)
        self.losses = losses
        self._method: Method = method
        self._budget = budget
        # Not that of the losses, which targets in float64 make wider than the model.
        dtypes = [forms.dtype_of(p) for uses in merged.values() for p in uses]
        self._dtype = forms.accumulation_dtype(*(dtypes or [losses.dtype]))
        # Nothing for a parameter that the losses do not depend on.
        self._merged = {name: list(merged[name]) for name in self.shapes}

    def __len__(self) -> int:
        return self.losses.shape[0]

    def __repr__(self) -> str:
        return (
            f"Factors of {len(self)} samples' gradients, {len(self.shapes)} parameters"
        )

    def contributions(self, name: str) -> list[Contribution]:
        """The merged uses of a parameter: for algebra of your own."""
        return list(self._merged[name])

    @property
    def smaller_than_gradients(self) -> bool:
        """Whether keeping them takes less memory than `materialize`."""
        uses = itertools.chain.from_iterable(self._merged.values())
        gradients = len(self) * sum(map(math.prod, self.shapes.values()))
        return sum(map(forms.held_elements, uses)) < gradients

    def plan(self, quantity: Quantity, other: Factors | None = None) -> Plan:
        """How ``"norms"`` or ``"gram"`` will be computed; print it."""
        if quantity not in QUANTITIES:
            allowed = " and ".join(map(repr, QUANTITIES))
            raise ValueError(f"plan({quantity!r}); allowed are {allowed}")
        return Plan(
            quantity,
            {name: self._choice(quantity, name, other) for name in self.shapes},
        )

    @_in_full_precision
    def norms(self, *, squared: bool = False) -> torch.Tensor:
        """``‖g_i‖`` over all parameters: ``(B,)``, never negative."""
        terms = [self._squared_norms(name) for name in self.shapes]
        total = self._sum(terms, (len(self),)).clamp(min=0)
        return total if squared else total.sqrt()

    @_in_full_precision
    def norms_by_parameter(self, *, squared: bool = False) -> dict[str, torch.Tensor]:
        """``‖g_i‖`` of each parameter: ``(B,)`` by name."""
        found = {name: self._squared_norms(name).clamp(min=0) for name in self.shapes}
        return (
            found if squared else {name: value.sqrt() for name, value in found.items()}
        )

    @_in_full_precision
    def gram(self) -> torch.Tensor:
        """``⟨g_i, g_j⟩``: ``(B, B)``, symmetric; products in full float32."""
        terms = [self._gram(name, self) for name in self.shapes]
        total = self._sum(terms, (len(self), len(self)))
        return (total + total.T) / 2

    @_in_full_precision
    def cross_gram(self, other: Factors) -> torch.Tensor:
        """``⟨g_i, g'_j⟩`` with the samples of another batch: ``(B, B')``."""
        if self.shapes != other.shapes:
            differing = set(self.shapes.items()) ^ set(other.shapes.items())
            raise ValueError(
                "cross_gram: the two batches were captured for different parameters "
                f"({', '.join(sorted({name for name, _ in differing}))}); capture the "
                "same model with the same params"
            )
        terms = [self._gram(name, other) for name in self.shapes]
        return self._sum(terms, (len(self), len(other)))

    @_in_full_precision
    def dot(self, vectors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``⟨v, g_i⟩``: ``(B,)``, or ``(B, K)`` for K vectors.

        Args:
            vectors: By name, of the parameter's shape or ``(K, *shape)``; all names.
        """
        many = check_vectors(vectors, self.shapes)
        count = len(next(iter(vectors.values()))) if many else 1
        columns = []
        for k in range(count):
            terms = []
            for name, parts in self._merged.items():
                vector = vectors[name][k] if many else vectors[name]
                vector = vector.detach().to(self._dtype)
                terms += [algebra.dot(part, vector, self._budget) for part in parts]
            columns.append(self._sum(terms, (len(self),)))
        return torch.stack(columns, 1) if many else columns[0]

    @_in_full_precision
    def weighted_sum(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """``Σ_i w_i g_i`` by name: of the parameter's shape, or ``(K, *shape)``.

        Args:
            weights: ``(B,)`` or ``(K, B)``; ones give the gradient of the summed loss.
        """
        if weights.dim() not in (1, 2) or weights.shape[-1] != len(self):
            raise ValueError(
                f"weights of shape {tuple(weights.shape)} for {len(self)} samples; "
                f"give ({len(self)},) or (K, {len(self)})"
            )
        rows = weights.detach().to(self._dtype)
        if weights.dim() == 1:
            return {name: self._weighted(name, rows) for name in self.shapes}
        return {
            name: torch.stack([self._weighted(name, row) for row in rows.unbind()])
            for name in self.shapes
        }

    @_in_full_precision
    def sketch(self, size: int, *, seed: int = 0) -> torch.Tensor:
        """Random sketches of all gradients: ``(B, size)``, without forming one.

        Linear in the gradient, the same map for every batch and device with the same
        names, shapes and seed. Inner products of sketches are those of the gradients
        in expectation over seeds; see `per_sample_grad.factors.sketch`.
        """
        if size < 1:
            raise ValueError(f"sketch({size}); give at least 1 number per sample")
        merged = [(n, shape, self._merged[n]) for n, shape in self.shapes.items()]
        found = sketch(merged, len(self), size, seed, self._budget)
        return self._sum([] if found is None else [found], (len(self), size))

    @_in_full_precision
    def materialize(self) -> dict[str, torch.Tensor]:
        """Every gradient: ``(B, *shape)`` by name. B times the model's size."""
        found = {}
        for name, shape in self.shapes.items():
            width = forms.matrix_shape(shape)[1]
            uses = self._merged[name]
            size = (len(self), *shape)
            if not uses:
                found[name] = self._sum([], size)
                continue
            samples = samples_of_gradients(uses, width, len(self), self._budget)
            found[name] = products.gradients(uses, shape, samples, 0, width).reshape(
                size
            )
        return found

    def _sum(self, terms: list[torch.Tensor], size: Sequence[int]) -> torch.Tensor:
        """The sum of the terms; zeros of this size where there are none."""
        if not terms:
            return torch.zeros(size, dtype=self._dtype, device=self.losses.device)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    def _weighted(self, name: str, weights: torch.Tensor) -> torch.Tensor:
        shape, parts = self.shapes[name], self._merged[name]
        terms = [
            algebra.weighted_sum(part, shape, weights, self._budget) for part in parts
        ]
        return self._sum(terms, shape)

    def _squared_norms(self, name: str) -> torch.Tensor:
        parts = self._merged[name]
        if not parts:
            return self._sum([], (len(self),))
        choice = self._choice("norms", name)
        if choice.form == "materialized":
            return products.materialized_squared_norms(
                parts, self.shapes[name], choice.samples, choice.columns
            )
        return products.squared_norms(parts, choice.samples)

    def _gram(self, name: str, other: Factors) -> torch.Tensor:
        with full_matmul_precision(self.losses.device):
            return self._gram_of(name, other)

    def _gram_of(self, name: str, other: Factors) -> torch.Tensor:
        left = self._merged[name]
        right = left if other is self else other._merged[name]
        if not left or not right:
            return self._sum([], (len(self), len(other)))
        choice = self._choice("gram", name, other)
        if choice.form == "materialized":
            return products.materialized_gram(
                left, right, self.shapes[name], choice.samples, choice.columns
            )
        return products.gram(left, right, choice.samples)

    def _choice(
        self, quantity: Quantity, name: str, other: Factors | None = None
    ) -> Choice:
        partner = self if other is None else other
        return choose(
            quantity,
            self._merged[name],
            self.shapes[name],
            num_samples=len(self),
            num_other=len(partner),
            other=partner._merged[name],
            method=self._method,
            budget=self._budget,
        )


def check_vectors(
    vectors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether there are K vectors; ValueError where names or shapes are wrong."""
    differing = sorted(set(vectors) ^ set(shapes))
    if differing:
        raise ValueError(
            f"dot: {', '.join(differing)} given or captured, but not both; give "
            "one tensor for every captured parameter"
        )
    single = all(vectors[name].shape == shape for name, shape in shapes.items())
    counts = {len(v) for v in vectors.values() if v.dim()}
    many = len(counts) == 1 and all(
        vectors[name].shape[1:] == shape and vectors[name].dim() == len(shape) + 1
        for name, shape in shapes.items()
    )
    if not single and not many:
        raise ValueError(
            "dot: vectors must have the parameters' shapes, or all of them one "
            "dimension of K in front; received "
            f"{ {name: tuple(v.shape) for name, v in vectors.items()} }"
        )
    return not single
