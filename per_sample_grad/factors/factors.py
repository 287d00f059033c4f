"""Every sample's gradient as factors, and the answers computed from them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import torch

from per_sample_grad.factors import algebra, forms
from per_sample_grad.factors import plan as planning
from per_sample_grad.factors.forms import Contribution, Dense, Outer, Windows
from per_sample_grad.factors.plan import Choice, Method, Quantity
from per_sample_grad.factors.projection import Projection

# Gradients of at most so many numbers are joined before they are squared: a small
# operation takes longer than its numbers do.
JOINED = 2**15
_CHANGED = (
    "a tensor that these factors hold was changed in place after the backward pass: an "
    "input of the model, such as a buffer that the next batch was copied to, or an "
    "earlier answer, such as the rows of materialize(). Ask for all answers before it "
    "is changed, or change a copy (tensor.clone())"
)


@dataclasses.dataclass(eq=False, repr=False)
class Factors:
    """The gradients of B losses, each formed only when an answer needs it.

    `Capture.backward` returns them. Every answer is in float32 or wider and has no
    graph. On a lazy device nothing is computed before it is fetched: ask for all the
    answers first, then fetch them together. Where all gradients of outputs came in
    bfloat16, products on a GPU are in TF32, which has three bits more than they have,
    and on a TPU in the process's own precision, by default that of bfloat16.

    Attributes:
        shapes: The shape of each parameter, by name.
        merged: What `contributions` are multiples of, by name; empty where the losses
            do not depend on a parameter.
        losses: ``(B,)``.
        multiplier: Gradients are so many times what contributions add up to: numbers
            that answers are multiplied by once, and not every activation's gradient.
        method: The form of products.
        budget: Bytes of temporary tensors.
        cancelling: Parameters whose positions cancel: known from earlier, and where
            values may be read from the device, found when products are asked for.
        may_read: Whether they may.
        of_bfloat16: Whether all gradients of outputs came in bfloat16.
        versions: Those of the tensors that contributions hold.
    """

    shapes: dict[str, tuple[int, ...]]
    merged: Mapping[str, Sequence[Contribution]]
    losses: torch.Tensor
    multiplier: float
    method: Method
    budget: int
    cancelling: set[str]
    may_read: bool
    of_bfloat16: bool
    versions: forms.Versions
    # Squared norms from factors, and the squares of the terms that they are sums of.
    _terms: dict[str, Sequence[torch.Tensor]] = dataclasses.field(default_factory=dict)

    def _precision(
        self, *others: Factors, products: bool = True
    ) -> contextlib.AbstractContextManager[object]:
        """Returns the context of an answer; refuses tensors that were changed."""
        batches = (self, *others)
        for each in batches:
            each.versions.refuse_changes(_CHANGED)
        of_bfloat16 = all(each.of_bfloat16 for each in batches)
        return forms.full_precision(self.losses.device, products, of_bfloat16)

    @functools.cached_property
    def _dtype(self) -> torch.dtype:
        """The dtype of answers.

        It is not that of the losses: float64 targets make it wider than the model's.
        """
        dtypes = [tensor.dtype for tensor, _ in self.versions.seen]
        return forms.accumulation_dtype(*(dtypes or [self.losses.dtype]))

    def __len__(self) -> int:
        return self.losses.shape[0]

    def __repr__(self) -> str:
        return (
            f"Factors of {len(self)} samples' gradients, {len(self.shapes)} parameters"
        )

    def contributions(self, name: str) -> list[Contribution]:
        """Returns the merged uses of a parameter, for your own algebra."""
        with self._precision():
            return [forms.multiplied(u, self.multiplier) for u in self.merged[name]]

    @property
    def are_smaller(self) -> bool:
        """Whether the factors hold fewer numbers than `materialize` returns."""
        held = sum(tensor.numel() for tensor, _ in self.versions.seen)
        return held < len(self.losses) * sum(map(math.prod, self.shapes.values()))

    def norms(self, *, squared: bool = False) -> torch.Tensor:
        """Returns ``‖g_i‖`` over all parameters, ``(B,)``, never negative."""
        terms, joined = [], []
        with self._precision():
            for name, uses in self.merged.items():
                match uses:
                    case [Dense(values)] if values.numel() <= JOINED:
                        joined.append(values.flatten(1))
                    case _:
                        terms.append(self._squared_norms(name))
            if joined:
                rows = joined[0] if len(joined) == 1 else torch.cat(joined, 1)
                terms.append(algebra.squares(rows))
            total = self._sum(terms, self.losses.shape, self.multiplier**2)
            return total if squared else total.sqrt()

    def norms_by_parameter(self, *, squared: bool = False) -> dict[str, torch.Tensor]:
        """Returns ``‖g_i‖`` of each parameter, ``(B,)``, by name."""
        square = self.multiplier**2
        with self._precision():
            found = {
                name: self._sum([self._squared_norms(name)], (len(self),), square)
                for name in self.shapes
            }
            return found if squared else {name: x.sqrt() for name, x in found.items()}

    def gram(self) -> torch.Tensor:
        """Returns ``⟨g_i, g_j⟩``, ``(B, B)``, symmetric, from full float32 products."""
        total = self.cross_gram(self)
        return (total + total.T) / 2

    def cross_gram(self, other: Factors) -> torch.Tensor:
        """Returns ``⟨g_i, g'_j⟩`` with the samples of another batch, ``(B, B')``."""
        if self.shapes != other.shapes:
            differing = set(self.shapes.items()) ^ set(other.shapes.items())
            raise ValueError(
                "cross_gram: captured for different parameters "
                f"({', '.join(sorted({name for name, _ in differing}))})"
            )
        with self._precision(other):
            terms = [self._gram(name, other) for name in self.shapes]
            number = self.multiplier * other.multiplier
            return self._sum(terms, (len(self), len(other)), number)

    def dot(self, vectors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns ``⟨v, g_i⟩``, ``(B,)``, or ``(B, K)`` for K vectors.

        Args:
            vectors: A tensor for every name in `shapes`, of the parameter's shape or
                ``(K, *shape)``.
        """
        many, terms, count = check_vectors(vectors, self.shapes), [], 1
        with self._precision():
            for name, uses in self.merged.items():
                rows = vectors[name].detach()
                rows = rows if many else rows.unsqueeze(0)
                count = len(rows)
                terms += [algebra.dot(use, rows, self.budget) for use in uses]
            found = self._sum(terms, (len(self), count), self.multiplier)
        return found if many else found[:, 0]

    def weighted_sum(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns ``Σ_i w_i g_i`` by name, of the parameter's shape or ``(K, *shape)``.

        Its products have the precision of a gradient's, which it may take the place of.

        Args:
            weights: ``(B,)`` or ``(K, B)``; ones give the gradient of the summed loss.
        """
        if weights.dim() not in (1, 2) or weights.shape[-1] != len(self):
            raise ValueError(
                f"weights of shape {tuple(weights.shape)} for {len(self)} samples; "
                f"give ({len(self)},) or (K, {len(self)})"
            )
        found = {}
        for name, shape in self.shapes.items():
            size = (*weights.shape[:-1], *shape)
            found[name] = torch.zeros(size, dtype=self._dtype, device=weights.device)
        many = weights.dim() == 2
        totals = found if many else {n: x.unsqueeze(0) for n, x in found.items()}
        self.add_weighted_sum_(totals, weights if many else weights.unsqueeze(0))
        return found

    def add_weighted_sum_(
        self, totals: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Adds `weighted_sum` to tensors in place, without forming it first.

        A sample without a weight but zero adds nothing, even if it is not finite.

        Args:
            totals: ``(K, *shape)`` for every name in `shapes`; views are allowed.
            weights: ``(K, B)``.
        """
        with self._precision(products=False):
            rows = weights.detach().to(self._dtype) * self.multiplier
            for name, uses in self.merged.items():
                for use in uses:
                    algebra.add_weighted_sums_(totals[name], use, rows, self.budget)

    def project(self, projection: Projection) -> dict[str, torch.Tensor]:
        """Returns projections of every gradient, ``(B, k1 k2)`` by name.

        None is formed.

        Args:
            projection: Of these parameters, and perhaps of others.
        """
        check_projected(self.shapes, projection)
        found, n = {}, len(self)
        with self._precision():
            for name, uses in self.merged.items():
                terms = [projection.of(name, uses, self.budget)] if uses else []
                size = n, math.prod(projection.kept[name])
                found[name] = self._sum(terms, size, self.multiplier)
        return found

    def materialize(self) -> dict[str, torch.Tensor]:
        """Returns every gradient, ``(B, *shape)`` by name: B times the model's size."""
        found, n = {}, len(self.losses)
        with self._precision():
            for name, shape in self.shapes.items():
                uses = [forms.multiplied(u, self.multiplier) for u in self.merged[name]]
                at_once = None
                if any(isinstance(use, Windows) for use in uses):  # to be unfolded
                    at_once = planning.samples_of_gradients(uses, shape, n, self.budget)
                if uses:
                    found[name] = algebra.gradients(uses, shape, at_once)
                else:
                    found[name] = self._sum([], (n, *shape))
        return found

    def _sum(
        self, terms: list[torch.Tensor], size: Sequence[int], number: float = 1
    ) -> torch.Tensor:
        """Returns ``number`` times the sum of terms; zeros where there are none."""
        if terms:
            total = sum(terms[1:], terms[0])
            return total if number == 1 else total * number
        return torch.zeros(size, dtype=self._dtype, device=self.losses.device)

    def cancellation(self, name: str) -> torch.Tensor | None:
        """Returns whether a parameter's positions cancel: a tensor of one bool.

        That is, whether norms from factors would have fewer digits than promised. None
        where nothing is planned to be computed from factors of several positions.
        """
        uses = self.merged[name]
        if self.method != "auto" or sum(use.positions for use in uses) < 2:
            return None
        plans = (self._planned(q, name, self, "auto") for q in planning.QUANTITIES)
        if all(choice.form != "factored" for choice in plans):
            return None
        if name not in self._terms:
            samples = self._planned("norms", name, self, "factored").samples
            with self._precision():
                found = algebra.squared_norms_and_terms(uses, samples)
            self._terms[name] = found
        return planning.cancels(*self._terms[name])

    def _cancels(self, name: str) -> bool:
        if self.may_read and name not in self.cancelling:
            found = self.cancellation(name)
            if found is not None and bool(found):
                self.cancelling.add(name)
        return name in self.cancelling

    def _squared_norms(self, name: str) -> torch.Tensor:
        uses, shape = self.merged[name], self.shapes[name]
        match uses:
            case []:
                return self._sum([], self.losses.shape)
            case [Dense(values)]:
                return algebra.squares(values)
            case [Outer(left, right)] if left.shape[1] == left.shape[2] == 1:
                if self.method != "materialized":
                    return algebra.squares(left) * algebra.squares(right)
        choice = self._choice("norms", name, self)
        if choice.form == "materialized":
            return algebra.materialized_squared_norms(uses, shape, choice.samples)
        found = self._terms.get(name)
        if found is None:
            found = algebra.squared_norms_and_terms(uses, choice.samples)
        return found[0].clamp(min=0)

    def _gram(self, name: str, other: Factors) -> torch.Tensor:
        left, right = self.merged[name], other.merged[name]
        if not left or not right:
            return self._sum([], (len(self), len(other)))
        choice = self._choice("gram", name, other)
        if choice.form == "materialized":
            return algebra.materialized_gram(
                left, right, self.shapes[name], choice.samples, choice.columns
            )
        return algebra.gram(left, right, choice.samples)

    def _choice(self, quantity: Quantity, name: str, other: Factors) -> Choice:
        choice = self._planned(quantity, name, other, self.method)
        is_free = self.method == "auto" and choice.form == "factored"
        if is_free and (self._cancels(name) or other._cancels(name)):
            return self._planned(quantity, name, other, "materialized")
        return choice

    def _planned(
        self, quantity: Quantity, name: str, other: Factors, method: Method
    ) -> Choice:
        uses, others, shape = self.merged[name], other.merged[name], self.shapes[name]
        partners = 1 if quantity == "norms" else len(other)
        share = planning.Share(uses, others, shape, len(self), partners, self.budget)
        return share.choose(method)


def check_vectors(
    vectors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """Returns whether there are K vectors for every parameter, and not one."""
    if differing := sorted(set(vectors) ^ set(shapes)):
        raise ValueError(f"dot: {', '.join(differing)} must be both given and captured")
    many = all(vectors[name].dim() > len(shape) for name, shape in shapes.items())
    counts = {vectors[name].shape[:many] for name in shapes}
    fits = all(vectors[name].shape[many:] == shape for name, shape in shapes.items())
    if not fits or len(counts) > 1:
        raise ValueError(
            "dot: vectors must have the parameters' shapes, or all of them one "
            "dimension of K in front; received "
            f"{ {name: tuple(v.shape) for name, v in vectors.items()} }"
        )
    return many


def check_projected(
    shapes: Mapping[str, tuple[int, ...]], projection: Projection
) -> None:
    """Raises ValueError unless the parameters are of the projection."""
    for name, shape in shapes.items():
        expected = projection.shapes.get(name)
        if expected != shape:
            raise ValueError(
                f"project: {name} of shape {shape} is captured, but the projection is "
                f"made for {expected or 'other parameters'}: build it of "
                "recorded.params, as in Projection(recorded.params, size)"
            )
