"""A numerical proof, once for every structure, that the factors are the gradients.

For random weights, ``Σ_i w_i g_i`` from the factors must equal autograd's gradient of
``Σ_i w_i loss_i``. Wrong attributions, ``ĝ_i ≠ g_i``, would have to satisfy
``Σ_i w_i (ĝ_i - g_i) = 0`` for weights that they do not depend on. So one ordinary
backward pass finds a wrong rule, a wrong batch dimension (also where T = B), samples
that are coupled, and uses that no rule saw, for each parameter separately.
"""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from collections.abc import Collection, Hashable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import nn

import xla_replica
from per_sample_grad.engine.recording import RecordedCall
from per_sample_grad.engine.settings import listed
from per_sample_grad.errors import CouplingError, PerSampleError
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.forms import accumulation_dtype
from xla_replica.common.trees import tensors_in

# Largest relative difference that counts as rounding. Accelerators multiply float32
# with fewer bits.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_ACCELERATOR_TOLERANCE = 2e-2
_HALF_TOLERANCE = 6e-2
# Units in the last place by which a sum's terms may be off together.
_ROUNDINGS = 4
# The most that large inputs may explain, relative to the whole gradient's size.
_LARGEST_NOISE = 0.1
# Share of a call's gradients in float16 that may be subnormal without a warning.
_UNDERFLOW = 0.05


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The distance of the factors from autograd's gradient.

    Attributes:
        errors: Relative differences by parameter; NaN where the gradient is not finite,
            so that nothing can be said.
        unseen: Parameters with a contribution so small that no error of a tenth in it
            would have been seen, as below a head that is zero, and how many were seen.
        tolerance: The largest error that counts as rounding.
        total_norm: The norm of the whole gradient.
        underflow: The largest share, in one call, of the nonzero float16 gradients of
            activations that are too small to have all their digits.
        cancelling: Parameters whose positions cancel, where that cannot be read at any
            other time.
    """

    errors: Mapping[str, float]
    unseen: Mapping[str, int]
    tolerance: float
    total_norm: float
    underflow: float
    cancelling: frozenset[str]

    @property
    def wrong(self) -> dict[str, float]:
        """The errors that are larger than rounding."""
        return {n: error for n, error in self.errors.items() if error > self.tolerance}

    @property
    def unknown(self) -> list[str]:
        """Those of which nothing can be said."""
        return [name for name, error in self.errors.items() if math.isnan(error)]


@dataclasses.dataclass
class Comparer:
    """Compares what the factors add up to with autograd, parameter by parameter.

    A difference is relative to the gradient's size, or where that is less, to what
    rounding explains.

    Attributes:
        losses: ``(B,)``.
        params: The parameters to compare, by name.
        dtypes: Those of all gradients in the graph, of which the least precise float
            decides what is rounding.
        scale: What losses are multiplied by in every backward pass.
        all_differ: Whether every sample has another weight.
        total_norm: A lower bound of the whole gradient's norm, other parameters
            included.
        reference: Autograd's gradient, by name; None: it was not computed.
    """

    losses: torch.Tensor
    params: Mapping[str, nn.Parameter]
    dtypes: Collection[torch.dtype]
    scale: float
    all_differ: bool
    total_norm: float = 0.0

    def __post_init__(self) -> None:
        self._weights = _weights(self.losses, self.all_differ)
        self._is_host = xla_replica.traits(self.losses).is_host
        self.reference: dict[str, torch.Tensor] | None = None
        # Weighted sums from the factors, until autograd's gradient is there.
        self._sums: dict[str, torch.Tensor] = {}
        self._distances: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        # By parameter, and by what contributes: one rule is right or wrong everywhere.
        self._rounding: dict[str, dict[str, torch.Tensor]] = {}
        self._underflow: list[torch.Tensor] = []
        self._cancelling: dict[str, torch.Tensor] = {}
        self._used: set[str] = set()
        # Float64 gradients may come from a part that computes in float32.
        self.dtypes = {each for each in self.dtypes if each.is_floating_point}
        precisions = [torch.finfo(dtype).eps for dtype in self.dtypes]
        self._least_eps = min(torch.finfo(torch.float32).eps, max(precisions))

    def compute_reference(self, retain_graph: bool) -> None:
        """Computes autograd's gradient, of losses with random weights."""
        gradients = xla_replica.grad(
            (self.losses * self._weights).sum() * self.scale,
            list(self.params.values()),
            retain_graph=retain_graph,
            allow_unused=True,
            materialize_grads=True,
        )
        self.reference = dict(zip(self.params, gradients))
        del gradients
        self._measure()

    def add(self, factors: Factors) -> None:
        """Takes parameters' factors; keeps only distances if there is a reference."""
        if self.params.keys().isdisjoint(factors.shapes):
            return
        for name, weighted in factors.weighted_sum(self._weights).items():
            if name not in self.params:
                continue
            if factors.merged[name]:
                self._used.add(name)
            self._sums[name] = weighted
            # The host looks at every pass; elsewhere later ones go by this one.
            cancels = None if self._is_host else factors.cancellation(name)
            if cancels is not None:
                self._cancelling[name] = cancels
        if self.reference is not None:
            self._measure()

    def _measure(self) -> None:
        """Replaces the weighted sums so far by their distances from the reference."""
        assert self.reference is not None
        for name in list(self._sums):
            weighted = self._sums.pop(name)
            truth = self.reference.pop(name).detach().to(weighted.dtype)
            if self.scale != 1:
                truth = truth / self.scale
            self._distances[name] = (weighted.sub_(truth).norm(), truth.norm())

    def add_gradient(
        self, recorded: RecordedCall, gradient: torch.Tensor, times: float
    ) -> None:
        """Takes the gradient of a call's output: what rounding may explain there.

        That of the losses is ``times`` the one that is given. Gradients that cancel (of
        a bias before a normalisation) differ by as much as the norm of the terms that
        are summed, times the dtype's precision. Keeps that norm, the product, and the
        product times the largest inputs.
        """
        owner = recorded.owner
        wanted = [name for name in dict.fromkeys(owner.names) if name in self.params]
        if not wanted:
            return
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        dtype = accumulation_dtype(gradient.dtype)
        size = torch.linalg.vector_norm(gradient, dtype=dtype)
        eps = max(torch.finfo(gradient.dtype).eps, self._least_eps)
        plain = scaled = size * (_ROUNDINGS * eps)
        # Masks are not multiplied, and may be -inf.
        given = recorded.call.arguments.items()
        multiplied = [value for name, value in given if "mask" not in name]
        for value in tensors_in(multiplied):
            if value.is_floating_point() and value.numel():
                if xla_replica.traits(value).is_lazy:
                    largest = value.abs().max()
                else:  # without a tensor of sizes
                    largest = torch.linalg.vector_norm(value, math.inf)
                scaled = scaled * largest.clamp(min=1).to(scaled.dtype)
        terms = torch.stack([size, plain, scaled]) * times
        for name in wanted:
            by_kind = self._rounding.setdefault(name, {})
            before = by_kind.get(owner.kind)
            by_kind[owner.kind] = terms if before is None else before + terms
        if gradient.dtype == torch.float16:
            nonzero = (gradient != 0).sum()
            small = nonzero - (gradient.abs() >= torch.finfo(torch.float16).tiny).sum()
            self._underflow.append(small / nonzero.clamp(min=1))

    def says_nothing_new(self, seen: Mapping[str, int]) -> bool:
        """Returns whether no contribution can be judged that could not be before.

        On a host these are all that have grown out of what rounding explains. Elsewhere
        one value is read back, and only a gradient that was zero has said nothing.

        Args:
            seen: How many contributions of each parameter were seen before.
        """
        if self._is_host:
            zero = self.losses.new_zeros(())
            self._distances = {n: (zero, each.norm()) for n, each in self._sums.items()}
            unseen = self.result().unseen
            return all(unseen.get(name, math.inf) <= seen[name] for name in self._sums)
        terms = [x for by_kind in self._rounding.values() for x in by_kind.values()]
        sizes = [each[0].float() for each in terms]
        return not sizes or not bool(torch.stack(sizes).count_nonzero())

    def result(self) -> Comparison:
        """Returns the distances; reads back from the device once."""
        zeros = next(iter(self._distances.values()))[0].new_zeros(3)
        most = torch.stack(self._underflow).max() if self._underflow else zeros[0]
        kinds = {n: [*self._rounding.get(n, {}).values()] for n in self.params}
        width = max(map(len, kinds.values()))
        columns = []
        for name, terms in kinds.items():
            cancels = self._cancelling.get(name, zeros[0])
            last = torch.stack([most, cancels.to(most.dtype)])
            filling = [zeros] * (width - len(terms))
            parts = (torch.stack(self._distances[name]), last, *terms, *filling)
            columns.append(torch.cat([part.to(zeros.dtype) for part in parts]))
        # One transfer for all of them.
        fetched = torch.stack(columns, 1).cpu().double()
        (distance, size, underflow, cancels), each = fetched[:4], fetched[4:]
        each = each.view(width, 3, len(kinds))
        terms, *roundings = each.sum(0)
        # The gradients that are finite are judged whatever the others are.
        finite = torch.isfinite(size)
        total_norm = max(float(size[finite].norm()), self.total_norm)
        tolerance = max(_TOLERANCES.get(each, _HALF_TOLERANCE) for each in self.dtypes)
        if 1e-4 < tolerance < _ACCELERATOR_TOLERANCE and not self._is_host:
            tolerance = _ACCELERATOR_TOLERANCE
        plain, scaled = (each.nan_to_num(0, 0, 0) / tolerance for each in roundings)
        allowed = torch.maximum(plain, scaled.clamp(max=_LARGEST_NOISE * total_norm))
        # A gradient may be rounding errors alone, as that of a constant added to the
        # logits of a softmax: these are as large as the whole gradient explains.
        eps = max(torch.finfo(each).eps for each in self.dtypes)
        floor = max(min(eps / tolerance, 1e-3) * total_norm, 1e-30)
        judged = torch.maximum(size.clamp(min=floor), allowed)
        errors = distance / judged
        errors[~torch.isfinite(errors)] = torch.inf
        errors[~finite] = torch.nan
        # Each kind's share of the gradient, as large as its part of the terms.
        shares = size * each[:, 0] / terms.clamp(min=1e-300)
        num_seen = (shares > min(10 * tolerance, 0.1) * judged).sum(0).tolist()
        unseen = {n for n, count in zip(kinds, num_seen) if count < len(kinds[n])}
        if not self._is_host:
            # Others are not looked at again: terms that are not small, with a sum that
            # is (of a bias before a normalisation), and gradients right to their size.
            tiny = torch.maximum(size, terms) <= 1e-3 * tolerance * total_norm
            tiny &= (size == 0) | (distance > tolerance * size)
            unseen = {name for name, is_so in zip(kinds, tiny.tolist()) if is_so}
        unseen &= self._used
        return Comparison(
            errors=dict(zip(kinds, errors.tolist())),
            unseen={n: count for n, count in zip(kinds, num_seen) if n in unseen},
            tolerance=tolerance,
            total_norm=total_norm,
            underflow=float(underflow[0]),
            cancelling=frozenset(n for n, does in zip(kinds, cancels.tolist()) if does),
        )


def raise_if_wrong(found: Comparison) -> None:
    """Raises if answers are wrong; warns if that is unknown, or of lost digits."""
    if found.underflow > _UNDERFLOW:
        lost = (
            f"{found.underflow:.0%} of the float16 gradients of one layer's output are "
            "so small that digits are lost, and others may have become zero. Pass "
            "scale=2.0**10, or a larger power of two (losses are multiplied by it in "
            "the backward pass, and answers divided), or use bfloat16"
        )
        if found.wrong:
            names = ", ".join(found.wrong)
            raise PerSampleError(f"the gradients of {names} are lost: {lost}")
        warnings.warn(lost, stacklevel=4)
    if found.wrong:
        lines = "".join(f"\n  {n}: off by {e:.2g}" for n, e in found.wrong.items())
        raise CouplingError(
            "per-sample gradients do not add up to autograd's gradient (relative "
            f"difference, allowed {found.tolerance:g}):{lines}\nThe usual causes: "
            "samples that influence each other's losses (batch statistics, attention "
            "across the batch), a batch that is not in dimension batch_dim, a wrong "
            "rule, a table with as many rows as the batch. Say where the batch is "
            "(batch_dim=; None for a module that returns the same for all samples), "
            'leave these parameters out (params=), or pass fallback="loop"'
        )
    if unknown := found.unknown:
        warnings.warn(
            f"autograd's gradients of {listed(unknown)} are not finite, so the "
            "answers of this batch could not be compared with them, and may be wrong "
            "for finite samples, too. Leave out samples whose loss is not finite, or "
            "capture a batch without any first",
            stacklevel=4,
        )


def _weights(losses: torch.Tensor, all_differ: bool) -> torch.Tensor:
    """Returns signed numbers between 1/4 and 4, the same every time: ``(B,)``.

    Powers of two scale a backward pass without rounding. Each ten consecutive samples
    have ten different ones. Where data decide which samples meet they may just exchange
    two, so that ``all_differ``.
    """
    generator = random.Random(0x5EED)
    values = [sign * 2.0**power for sign in (1, -1) for power in range(-2, 3)]
    drawn: list[float] = []
    while len(drawn) < len(losses):
        drawn += generator.sample(values, len(values))
    if all_differ and len(losses) > len(values):
        drawn = [math.copysign(2 ** generator.uniform(-2, 2), each) for each in drawn]
    return torch.tensor(drawn[: len(losses)], dtype=losses.dtype).to(losses.device)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What earlier comparisons found for one structure of one model.

    Attributes:
        unseen: How many contributions were seen, of parameters where that is not all.
        astray: As in `walk.Table`, if ``is_structural``.
        is_structural: Whether all calls that the losses depend on account for the
            parameters, and nothing else does, whatever the data.
        wrong: Those that a fallback had to replace.
        total_norm: The norm of the whole gradient.
        cancelling: Those whose positions cancel.
    """

    unseen: Mapping[str, int]
    astray: frozenset[str]
    is_structural: bool
    wrong: frozenset[str] = frozenset()
    total_norm: float = 0.0
    cancelling: frozenset[str] = frozenset()

    def after(self, found: Comparison, wrong: Collection[str]) -> Proof:
        """Returns what is proven after another comparison."""
        both = [name for name in found.unseen if name in self.unseen]
        unseen = {name: max(found.unseen[name], self.unseen[name]) for name in both}
        return dataclasses.replace(
            self,
            unseen=unseen,
            wrong=self.wrong | frozenset(wrong),
            total_norm=max(found.total_norm, self.total_norm),
            cancelling=self.cancelling | found.cancelling,
        )


# What is proven of each model's structures, by their keys.
PROVEN: WeakKeyDictionary[nn.Module, dict[Hashable, Proof]] = WeakKeyDictionary()
