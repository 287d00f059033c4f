"""A numerical proof, once, that the factors are the gradients of this very model.

For random weights, ``Σ_i w_i g_i`` from the factors must equal autograd's gradient of
``Σ_i w_i loss_i``. Wrong attributions, ``ĝ_i ≠ g_i``, would have to satisfy
``Σ_i w_i (ĝ_i - g_i) = 0`` for weights they know nothing of. So one ordinary backward
pass finds a wrong rule, a wrong batch dimension (also where T = B), samples that are
coupled, and uses that no rule saw, for one parameter after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from per_sample_grad.errors import CouplingError
from per_sample_grad.factors import Factors

if TYPE_CHECKING:
    from per_sample_grad.capture import Use

Check = Literal["first", "always", "never"]
CHECKS: tuple[Check, ...] = ("first", "always", "never")

# Largest relative difference that counts as rounding. Accelerators multiply float32
# with fewer bits.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_ACCELERATOR_TOLERANCE = 2e-2
_HALF_TOLERANCE = 6e-2

_PROVEN: weakref.WeakKeyDictionary[nn.Module, set[Hashable]]
_PROVEN = weakref.WeakKeyDictionary()


def signature(
    losses: torch.Tensor, uses: Sequence[Use], names: Collection[str]
) -> Hashable:
    """What must be alike for one proof to hold for two captures."""
    calls = tuple(
        (
            use.name,
            use.rule.name,
            use.call.batch_dim,
            use.shape,
            use.call.module.training,
        )
        for use in uses
    )
    return (calls, losses.shape, losses.dtype, losses.device, tuple(names))


def is_due(check: Check, model: nn.Module, key: Hashable) -> bool:
    """Whether this capture is to be compared with autograd."""
    if check == "first":
        return key not in _PROVEN.get(model, ())
    return check == "always"


def verify(
    losses: torch.Tensor,
    params: Mapping[str, nn.Parameter],
    factors: Factors,
    model: nn.Module,
    key: Hashable,
) -> dict[str, float]:
    """Compares with autograd, reading the device back once.

    Returns:
        The relative difference of each parameter's gradient.

    Raises:
        CouplingError: A difference that is no rounding, with the parameters' names.
    """
    weights = _weights(losses)
    expected = torch.autograd.grad(
        (losses * weights).sum(),
        list(params.values()),
        retain_graph=True,
        allow_unused=True,
    )
    actual = factors.weighted_sum(weights)
    differences, sizes = [], []
    for name, grad in zip(params, expected):
        found = actual[name]
        truth = (
            torch.zeros_like(found) if grad is None else grad.detach().to(found.dtype)
        )
        differences.append((found - truth).norm())
        sizes.append(truth.norm())
    # One transfer for all of them.
    both = torch.stack([torch.stack(differences), torch.stack(sizes)]).cpu().double()
    difference, size = both[0], both[1]
    floor = 1e-3 * float(size.norm())
    errors = difference / size.clamp(min=max(floor, 1e-30))
    found_errors = dict(zip(params, errors.tolist()))
    if bool(torch.isfinite(size).all()):
        _judge(found_errors, _tolerance(losses, params, factors))
        _PROVEN.setdefault(model, set()).add(key)
    return found_errors


def _judge(errors: Mapping[str, float], tolerance: float) -> None:
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong:
        lines = "".join(
            f"\n  {name}: off by {error:.2g}" for name, error in wrong.items()
        )
        raise CouplingError(
            "per-sample gradients do not add up to autograd's gradient (relative "
            f"difference, allowed {tolerance:g}):{lines}\nThe usual causes: samples "
            "that influence each other's losses (batch statistics, losses that "
            "compare samples, attention across the batch), a batch that is not in "
            "dimension batch_dim of these modules, global forward hooks, a registered "
            "rule that is wrong. Say where the batch is (batch_dim=), make the "
            'samples independent, or use fallback="loop" for these parameters'
        )


def _weights(losses: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/8 between -2 and 2 but 0, drawn alike every time: exact."""
    generator = torch.Generator().manual_seed(0x5EED)
    drawn = torch.randint(1, 17, (len(losses),), generator=generator)
    signs = torch.randint(0, 2, (len(losses),), generator=generator) * 2 - 1
    return (drawn * signs / 8).to(losses.dtype).to(losses.device)


def _tolerance(
    losses: torch.Tensor, params: Mapping[str, nn.Parameter], factors: Factors
) -> float:
    dtypes = {losses.dtype, *(p.dtype for p in params.values()), *factors.seen_dtypes}
    if dtypes - set(_TOLERANCES):
        return _HALF_TOLERANCE
    tolerance = max(_TOLERANCES[dtype] for dtype in dtypes)
    if tolerance > 1e-4 and losses.device.type != "cpu":
        return _ACCELERATOR_TOLERANCE
    return tolerance
