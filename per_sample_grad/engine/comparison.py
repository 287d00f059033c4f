"""A numerical proof, once for every structure, that the factors are the gradients.

For random weights, ``Σ_i w_i g_i`` from the factors must equal autograd's gradient of
``Σ_i w_i loss_i``. Wrong attributions, ``ĝ_i ≠ g_i``, would have to satisfy
``Σ_i w_i (ĝ_i - g_i) = 0`` for weights that they do not depend on. So one ordinary
backward pass finds a wrong rule, a wrong batch dimension (also where T = B), samples
that are coupled, and uses that no rule saw, for each parameter separately.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
import warnings
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

import xla_replica
from per_sample_grad.engine.recording import RecordedCall
from per_sample_grad.errors import CouplingError, PerSampleError
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.forms import accumulation_dtype
from per_sample_grad.layers.registry import Call
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

Check = Literal["first", "always", "never"]
CHECKS: tuple[Check, ...] = ("first", "always", "never")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The distance of the factors from autograd's gradient."""

    # Relative differences by parameter; NaN where the gradient is not finite, so that
    # nothing can be said.
    errors: Mapping[str, float]
    # Parameters that the losses depend on, but with a gradient so small that no error
    # in it would have been seen, as below a head that is zero.
    silent: frozenset[str]
    tolerance: float  # the largest error that counts as rounding
    whole: float  # the size of the whole gradient
    # The largest share, in one call, of the nonzero float16 gradients of activations
    # that are too small to have all their digits.
    underflow: float
    # Parameters whose positions cancel, where that cannot be read at any other time.
    cancelling: frozenset[str]

    @property
    def wrong(self) -> dict[str, float]:
        """The errors that are larger than rounding."""
        return {n: error for n, error in self.errors.items() if error > self.tolerance}


class Comparer:
    """Compares what the factors add up to with autograd, parameter by parameter.

    A difference is relative to the gradient's size, or where that is less, to 1/1000
    of the whole gradient's or to what rounding explains.

    ``whole`` is a lower bound of the whole gradient's size, other parameters included;
    losses are multiplied by ``scale`` in every backward pass; ``dtypes`` are those of
    all gradients in the graph, of which the least precise one decides what is rounding;
    ``differ`` demands another weight for every sample.
    """

    def __init__(
        self,
        losses: torch.Tensor,
        params: Mapping[str, nn.Parameter],
        whole: float,
        scale: float,
        dtypes: Collection[torch.dtype],
        differ: bool,
    ) -> None:
        self.params = params
        self._scale = scale
        self._whole = whole
        self._losses = losses
        self._weights = _weights(losses, differ)
        self._expected: dict[str, torch.Tensor] | None = None
        # Sums from the factors, until autograd's gradient is there.
        self._actual: dict[str, torch.Tensor] = {}
        self._distances: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._noise: dict[str, torch.Tensor] = {}
        self._underflow: list[torch.Tensor] = []
        self._cancelling: dict[str, torch.Tensor] = {}
        self._used: set[str] = set()
        precisions = [torch.finfo(dtype).eps for dtype in dtypes]
        self._tolerance = max(
            _TOLERANCES.get(dtype, _HALF_TOLERANCE) for dtype in dtypes
        )
        # Float64 gradients may come from a part that computes in float32.
        single = torch.finfo(torch.float32).eps
        self._least_eps = min(single, max(precisions))
        self._on_host = xla_replica.traits(losses).is_host
        self._is_lazy = xla_replica.traits(losses).is_lazy

    @property
    def knows_truth(self) -> bool:
        """Whether autograd's gradient was computed."""
        return self._expected is not None

    def expect(self, retain_graph: bool) -> None:
        """Computes autograd's gradient, of losses with random weights."""
        gradients = xla_replica.grad(
            (self._losses * self._weights).sum() * self._scale,
            list(self.params.values()),
            retain_graph=retain_graph,
            allow_unused=True,
            materialize_grads=True,
        )
        self._expected = dict(zip(self.params, gradients))
        del gradients
        self._measure()

    def add(self, factors: Factors) -> None:
        """Takes the factors of some parameters; after `expect` keeps only distances."""
        if self.params.keys().isdisjoint(factors.shapes):
            return
        for name, actual in factors.weighted_sum(self._weights).items():
            if name not in self.params:
                continue
            if factors.merged[name]:
                self._used.add(name)
            self._actual[name] = actual
            cancels = factors.cancellation(name) if self._is_lazy else None
            if cancels is not None:
                self._cancelling[name] = cancels
        if self._expected is not None:
            self._measure()

    def _measure(self) -> None:
        assert self._expected is not None
        for name in list(self._actual):
            actual = self._actual.pop(name)
            truth = self._expected.pop(name).detach().to(actual.dtype)
            if self._scale != 1:
                truth = truth / self._scale
            self._distances[name] = (actual.sub_(truth).norm(), truth.norm())

    def witness(
        self,
        call: Call,
        names: Collection[str],
        gradient: torch.Tensor,
        multiplier: float,
    ) -> None:
        """Takes the gradient of a call's output: what rounding may explain there.

        That of the losses is ``multiplier`` times the one that is given.

        Gradients that cancel (of a bias before a normalisation) differ by as much as
        the norm of the terms that are summed, times the dtype's precision. Keeps that
        norm, the product, and the product times the largest inputs.
        """
        wanted = [name for name in dict.fromkeys(names) if name in self.params]
        if not wanted:
            return
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        dtype = accumulation_dtype(gradient.dtype)
        size = torch.linalg.vector_norm(gradient, dtype=dtype)
        eps = max(torch.finfo(gradient.dtype).eps, self._least_eps)
        plain = size * (_ROUNDINGS * eps)
        scaled = plain
        forward = inspect.signature(type(call.module).forward)
        given = forward.bind_partial(call.module, *call.args, **call.kwargs).arguments
        # Masks are not multiplied, and may be -inf.
        multiplied = [value for name, value in given.items() if "mask" not in name]
        for value in tensors_in(multiplied):
            if value.is_floating_point() and value.numel():
                if xla_replica.traits(value).is_lazy:
                    largest = value.abs().max()
                else:  # without a tensor of sizes
                    largest = torch.linalg.vector_norm(value, math.inf)
                scaled = scaled * largest.clamp(min=1).to(scaled.dtype)
        terms = torch.stack([size, plain, scaled]) * multiplier
        for name in wanted:
            before = self._noise.get(name)
            self._noise[name] = terms if before is None else before + terms
        if gradient.dtype == torch.float16:
            something = (gradient != 0).sum()
            tiny = torch.finfo(torch.float16).tiny
            small = something - (gradient.abs() >= tiny).sum()
            self._underflow.append(small / something.clamp(min=1))

    def nothing_arrived(self) -> bool:
        """Returns whether all gradients that came to these parameters were zero.

        Then the parameters' gradients are zero, too, whatever the rules say. Reads one
        value back from the device.
        """
        sizes = [terms[0].float() for terms in self._noise.values()]
        return not sizes or not bool(torch.stack(sizes).count_nonzero())

    def result(self) -> Comparison:
        """Returns the verdict; reads back from the device once."""
        zeros = next(iter(self._distances.values()))[0].new_zeros(3)
        most = torch.stack(self._underflow).max() if self._underflow else zeros[0]
        columns = []
        for name in self.params:
            noise = self._noise.get(name, zeros)
            cancels = self._cancelling.get(name, zeros[0])
            ends = torch.stack([most, cancels.to(most.dtype)])
            parts = (torch.stack(self._distances[name]), noise, ends)
            columns.append(torch.cat([part.to(zeros.dtype) for part in parts]))
        # One transfer for all of them.
        fetched = torch.stack(columns, 1).cpu().double()
        distance, size, terms, *noisy, underflow, cancels = fetched.unbind()
        # The gradients that are finite are judged whatever the others are.
        finite = torch.isfinite(size)
        whole = max(float(size[finite].norm()), self._whole)
        floor = max(1e-3 * whole, 1e-30)
        tolerance = self._tolerance
        if 1e-4 < tolerance < _ACCELERATOR_TOLERANCE and not self._on_host:
            tolerance = _ACCELERATOR_TOLERANCE
        plain, scaled = (
            torch.where(torch.isfinite(noise), noise, 0.0) / tolerance
            for noise in noisy
        )
        allowed = torch.maximum(plain, scaled.clamp(max=_LARGEST_NOISE * whole))
        errors = distance / torch.maximum(size.clamp(min=floor), allowed)
        errors[~torch.isfinite(errors)] = torch.inf
        errors[~finite] = torch.nan
        # Where the terms are not small, but their sum is, they cancel (a bias before a
        # normalisation), and that was seen.
        unseen = torch.maximum(size, terms) <= tolerance * floor
        # A gradient that is right to its own size was seen, too, however small it is.
        unseen &= (size == 0) | (distance > tolerance * size)
        quiet = {name for name, nothing in zip(self.params, unseen.tolist()) if nothing}
        relative = dict(zip(self.params, errors.tolist()))
        return Comparison(
            errors=relative,
            silent=frozenset(quiet & self._used),
            tolerance=tolerance,
            whole=whole,
            underflow=float(underflow[0]),
            cancelling=frozenset(n for n, c in zip(self.params, cancels) if c),
        )


def judge(found: Comparison) -> None:
    """Warns if float16 loses digits of many gradients; raises if answers are wrong."""
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
            "samples that influence each other's losses (batch statistics, losses that "
            "compare samples, attention across the batch), a batch that is not in "
            "dimension batch_dim of these modules, global forward hooks, a registered "
            "rule that is wrong, a table of positions that has as many rows as the "
            "batch or a multiple. Say where the batch is (batch_dim=; None for a "
            "module that returns the same for all samples), make the samples "
            "independent, leave these parameters out (params=), or pass "
            'fallback="loop", which is exact for each loss as it is'
        )


def _weights(losses: torch.Tensor, differ: bool) -> torch.Tensor:
    """Returns signed numbers between 1/4 and 4, the same every time: ``(B,)``.

    Powers of two scale a backward pass without rounding. Each ten consecutive samples
    have ten different ones. Where data decide which samples meet they may just exchange
    two, so that all must `differ`.
    """
    generator = random.Random(0x5EED)
    values = [sign * 2.0**power for sign in (1, -1) for power in range(-2, 3)]
    drawn: list[float] = []
    while len(drawn) < len(losses):
        drawn += generator.sample(values, len(values))
    if differ and len(losses) > len(values):
        drawn = [math.copysign(2 ** generator.uniform(-2, 2), each) for each in drawn]
    return torch.tensor(drawn[: len(losses)], dtype=losses.dtype).to(losses.device)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What earlier comparisons found for one structure of one model."""

    silent: frozenset[str]  # parameters about which nothing was learnt yet
    wrong: frozenset[str] = frozenset()  # those that a fallback had to replace
    whole: float = 0.0  # the size of the whole gradient
    cancelling: frozenset[str] = frozenset()  # those whose positions cancel
    # Whether it holds for other data, too: `independence.samples_stay_apart`.
    holds: bool = False


PROVEN: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Proof]]
PROVEN = weakref.WeakKeyDictionary()


def signature(
    losses: torch.Tensor,
    calls: Sequence[RecordedCall],
    params: Mapping[str, nn.Parameter],
    structure: Hashable,
) -> Hashable:
    """Returns what must be equal for one proof to hold for two captures.

    ``structure`` is that of the operations outside of modules, those of the loss among
    them.
    """
    called = tuple(
        [
            (
                *each.owner.identity,
                each.call.batch_dim,
                each.shape,
                each.call.module.training,
            )
            for each in calls
        ]
    )
    kind = (losses.shape, losses.dtype, losses.device)
    shapes = tuple([param.shape for param in params.values()])
    return (called, kind, tuple(params), shapes, structure)


def remember(
    model: nn.Module,
    key: Hashable,
    found: Comparison,
    wrong: Collection[str],
    holds: bool,
) -> None:
    """Keeps what a comparison proved, so that it is not repeated if it `holds`."""
    if not any(math.isnan(error) for error in found.errors.values()):
        proven = PROVEN.setdefault(model, {})
        before = proven.get(key, Proof(found.silent))
        proven[key] = Proof(
            found.silent & before.silent,
            before.wrong | frozenset(wrong),
            max(found.whole, before.whole),
            before.cancelling | found.cancelling,
            holds,
        )
