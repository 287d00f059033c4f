"""A numerical proof, once, that the factors are the gradients of this very model.

For random weights, ``Σ_i w_i g_i`` from the factors must equal autograd's gradient of
``Σ_i w_i loss_i``. Wrong attributions, ``ĝ_i ≠ g_i``, would have to satisfy
``Σ_i w_i (ĝ_i - g_i) = 0`` for weights they know nothing of. So one ordinary backward
pass finds a wrong rule, a wrong batch dimension (also where T = B), samples that are
coupled, and uses that no rule saw, for one parameter after the other.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
import weakref
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from per_sample_grad.calls import Call, tensors_in
from per_sample_grad.contributions import accumulation_dtype
from per_sample_grad.errors import CouplingError
from per_sample_grad.factors import Factors

if TYPE_CHECKING:
    from per_sample_grad.graph import Reached
    from per_sample_grad.recording import Use

Check = Literal["first", "always", "never"]
CHECKS: tuple[Check, ...] = ("first", "always", "never")

# Largest relative difference that counts as rounding. Accelerators multiply float32
# with fewer bits.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_ACCELERATOR_TOLERANCE = 2e-2
_HALF_TOLERANCE = 6e-2
# Units in the last place by which a sum's terms may be off together.
_ROUNDINGS = 4
# Of the whole gradient's size: what large inputs may explain at most.
_LARGEST_NOISE = 0.1

# Of every structure that was compared, the parameters of which nothing was learnt yet.
_PROVEN: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, frozenset[str]]]
_PROVEN = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """With autograd.

    Attributes:
        errors: Relative differences by parameter; NaN where the gradient is not finite,
            so that nothing can be said.
        silent: Parameters that the losses depend on, but with a gradient so small that
            no error in it would have been seen: those below a head that is zero.
    """

    errors: Mapping[str, float]
    silent: frozenset[str]


def signature(
    losses: torch.Tensor, uses: Sequence[Use], names: Collection[str], reached: Reached
) -> Hashable:
    """What must be alike for one proof to hold for two captures.

    The modules that were called, their shapes, and the operations outside of them,
    the loss among them.
    """
    calls = tuple(
        (
            use.name,
            use.rule,
            use.call.batch_dim,
            use.shape,
            use.call.module.training,
        )
        for use in uses
    )
    return (
        calls,
        losses.shape,
        losses.dtype,
        losses.device,
        tuple(names),
        *(reached.outside.items()),
        reached.structure,
    )


def is_due(check: Check, model: nn.Module, key: Hashable) -> bool:
    """Whether this capture is to be compared with autograd."""
    if check == "first":
        proven = _PROVEN.get(model, {})
        return key not in proven or bool(proven[key])
    return check == "always"


def compare(
    losses: torch.Tensor,
    params: Mapping[str, nn.Parameter],
    factors: Factors,
    noises: Mapping[str, torch.Tensor],
    retain_graph: bool,
) -> Comparison:
    """Relative differences from autograd by parameter; reads the device back once.

    Relative to the gradient's size, or where that is less to 1/1000 of the whole
    gradient's or to what rounding explains; large inputs explain no more than a tenth
    of the whole gradient.
    """
    weights = _weights(losses)
    expected = torch.autograd.grad(
        (losses * weights).sum(),
        list(params.values()),
        retain_graph=retain_graph,
        allow_unused=True,
    )
    actual = factors.weighted_sum(weights)
    distances, sizes, rounding = [], [], []
    for name, grad in zip(params, expected):
        found = actual[name]
        truth = (
            torch.zeros_like(found) if grad is None else grad.detach().to(found.dtype)
        )
        distances.append((found - truth).norm())
        sizes.append(truth.norm())
        rounding.append(
            noises[name].to(found.dtype) if name in noises else found.new_zeros(3)
        )
    # One transfer for all of them.
    columns = [torch.stack(distances), torch.stack(sizes), *torch.stack(rounding, 1)]
    distance, size, terms, *noisy = torch.stack(columns).cpu().double().unbind()
    # The gradients that are finite are judged whatever the others are.
    finite = torch.isfinite(size)
    whole = float(size[finite].norm())
    floor = max(1e-3 * whole, 1e-30)
    tolerance = tolerance_of(losses, params, factors)
    plain, scaled = (
        torch.where(torch.isfinite(noise), noise, 0.0) / tolerance for noise in noisy
    )
    allowed = torch.maximum(plain, scaled.clamp(max=_LARGEST_NOISE * whole))
    errors = distance / torch.maximum(size.clamp(min=floor), allowed)
    errors[~torch.isfinite(errors)] = torch.inf
    errors[~finite] = torch.nan
    # What the terms are that were summed: where they are not small, but their sum is,
    # they cancel (a bias before a normalisation), and that was seen.
    unseen = (torch.maximum(size, terms) <= tolerance * floor).tolist()
    silent = frozenset(
        name
        for name, nothing in zip(params, unseen)
        if nothing and factors.contributions(name)
    )
    return Comparison(dict(zip(params, errors.tolist())), silent)


def judge(
    errors: Mapping[str, float],
    losses: torch.Tensor,
    params: Mapping[str, nn.Parameter],
    factors: Factors,
) -> None:
    """Raises CouplingError where a difference is no rounding."""
    tolerance = tolerance_of(losses, params, factors)
    wrong = {name: error for name, error in errors.items() if error > tolerance}
    if wrong:
        lines = "".join(f"\n  {name}: off by {off:.2g}" for name, off in wrong.items())
        raise CouplingError(
            "per-sample gradients do not add up to autograd's gradient (relative "
            f"difference, allowed {tolerance:g}):{lines}\nThe usual causes: samples "
            "that influence each other's losses (batch statistics, losses that "
            "compare samples, attention across the batch), a batch that is not in "
            "dimension batch_dim of these modules, global forward hooks, a registered "
            "rule that is wrong. Say where the batch is (batch_dim=), make the samples "
            "independent, or leave these parameters out (params=)"
        )


def remember(model: nn.Module, key: Hashable, found: Comparison) -> None:
    """The comparison need not be repeated, unless it said nothing of a parameter."""
    if not any(math.isnan(error) for error in found.errors.values()):
        proven = _PROVEN.setdefault(model, {})
        proven[key] = found.silent & proven.get(key, found.silent)


def noise(
    uses: Sequence[Use], grads: Sequence[torch.Tensor | None], names: Mapping[int, str]
) -> dict[str, torch.Tensor]:
    """How far rounding alone may move each parameter's gradient, on the device.

    The norm of the terms that are summed, times the dtype's precision: gradients that
    cancel to nothing (a bias before a normalisation) differ by that much. Three
    numbers: the norm of the output's gradient, that by the precision, and this times
    the largest inputs.
    """
    found: dict[str, torch.Tensor] = {}
    for use, grad in zip(uses, grads):
        if grad is None:
            continue
        size = grad.to(accumulation_dtype(grad.dtype)).norm()
        plain = size * (_ROUNDINGS * torch.finfo(grad.dtype).eps)
        scaled = plain
        for value in _multiplied(use.call):
            if value.is_floating_point() and value.numel():
                scaled = scaled * value.abs().max().clamp(min=1).to(scaled.dtype)
        terms = torch.stack([size, plain, scaled])
        for param in use.call.module.parameters():
            name = names.get(id(param))
            if name is not None:
                found[name] = found[name] + terms if name in found else terms
    return found


def _multiplied(call: Call) -> Iterator[torch.Tensor]:
    """The tensors that enter products: not masks, which are added and may be -inf."""
    forward = inspect.signature(type(call.module).forward)
    given = forward.bind(call.module, *call.args, **call.kwargs).arguments
    for name, value in given.items():
        if "mask" not in name:
            yield from tensors_in(value)


def _weights(losses: torch.Tensor) -> torch.Tensor:
    """Signed powers of two between 1/4 and 4, drawn alike every time: ``(B,)``.

    Exact: they scale a backward pass without a rounding. Each ten samples have ten
    different ones.
    """
    generator = random.Random(0x5EED)
    values = [sign * 2.0**power for sign in (1, -1) for power in range(-2, 3)]
    drawn: list[float] = []
    while len(drawn) < len(losses):
        drawn += generator.sample(values, len(values))
    return torch.tensor(drawn[: len(losses)], dtype=losses.dtype).to(losses.device)


def tolerance_of(
    losses: torch.Tensor, params: Mapping[str, nn.Parameter], factors: Factors
) -> float:
    """The largest relative difference that counts as rounding for these dtypes."""
    dtypes = {losses.dtype, *(p.dtype for p in params.values()), *factors.seen_dtypes}
    if dtypes - set(_TOLERANCES):
        return _HALF_TOLERANCE
    tolerance = max(_TOLERANCES[dtype] for dtype in dtypes)
    if tolerance > 1e-4 and losses.device.type != "cpu":
        return _ACCELERATOR_TOLERANCE
    return tolerance
