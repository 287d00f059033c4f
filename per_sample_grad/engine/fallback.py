"""Exact, expensive gradients of parameters that no layer rule accounts for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn

import torch

import xla_replica
from per_sample_grad.engine import graph
from per_sample_grad.engine.recording import EnclosingCall
from per_sample_grad.engine.rerunning import by_running_again
from per_sample_grad.errors import CoverageError

Fallback = Literal["error", "loop", "batched"]
Params = Mapping[str, torch.nn.Parameter]


def loop(
    losses: torch.Tensor, params: Params, calls: Sequence[EnclosingCall]
) -> dict[str, torch.Tensor]:
    """Runs B backward passes of the batch: exact for whatever autograd can do."""
    rows = [
        xla_replica.grad(
            loss,
            list(params.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for loss in losses.unbind()
    ]
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows))}


def batched(
    losses: torch.Tensor, params: Params, calls: Sequence[EnclosingCall]
) -> dict[str, torch.Tensor]:
    """Runs modules once more, vectorised by torch, at a cost in proportion to B.

    The modules are the smallest ones whose calls hold all uses of a parameter.
    Gradients that cannot be computed in this way, and all where no calls are given,
    take B backward passes of the batch, which torch vectorises.
    """
    found, reasons = by_running_again(losses, params, calls)
    rest = {name: param for name, param in params.items() if name not in found}
    if not rest:
        return found
    if reasons:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        warnings.warn(
            f'fallback="batched" runs {len(losses)} backward passes of the batch, so '
            "that its cost grows with the square of the batch size, because no module "
            f"could be run once more for these parameters:{lines}\nRegister a rule "
            "(register_rule), or take smaller batches",
            stacklevel=2,
        )
    gradients = xla_replica.grad(
        losses,
        list(rest.values()),
        torch.eye(len(losses), dtype=losses.dtype, device=losses.device),
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    for (name, param), grad in zip(rest.items(), gradients):
        zeros = param.new_zeros(len(losses), *param.shape)
        found[name] = zeros if grad is None else grad
    return found


class FallbackWay(NamedTuple):
    """A row of `FALLBACKS`.

    Attributes:
        gradients: From losses, parameters and calls that may be run again to the
            gradients ``(B, *shape)`` by name.
        takes_calls: Whether the calls are of use to it.
    """

    gradients: Callable[
        [torch.Tensor, Params, Sequence[EnclosingCall]], dict[str, torch.Tensor]
    ]
    takes_calls: bool


FALLBACKS: dict[str, FallbackWay | None] = {
    "error": None,
    "loop": FallbackWay(loop, takes_calls=False),
    "batched": FallbackWay(batched, takes_calls=True),
}


def raise_uncovered(
    problems: Mapping[str, Collection[str]], losses: torch.Tensor, called: bool
) -> NoReturn:
    """Raises CoverageError that says what problems parameters have, and what to do.

    ``called`` is whether any module with a selected parameter was called.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reasons in problems.items():
        by_reason.setdefault("; ".join(reasons), []).append(name)
    lines = "".join(
        f"\n  {', '.join(names)}: {reason}" for reason, names in by_reason.items()
    )
    remark = "" if called else _why_uncalled(losses)
    fallback = (
        'fallback="batched" (what uses them runs once more, vectorised) '
        'or, where that fails, fallback="loop" (B backward passes of the batch)'
    )
    if xla_replica.traits(losses).is_lazy:
        fallback = 'fallback="batched" (B backward passes of the batch at once)'
    raise CoverageError(
        "these parameters have uses that no layer rule accounts for:"
        f"{lines}\n{remark}Register a rule for the module "
        "(register_rule, the cheapest), leave the parameters out (params=), or "
        f"pass {fallback}"
    )


def _why_uncalled(losses: torch.Tensor) -> str:
    """Returns the likely cause where no module's hook has run."""
    if "CompiledFunctionBackward" in graph.inventory(losses).names:
        return (
            "They are used by what torch.compile has compiled, which calls no hooks: "
            "call the model in the capture, not a compiled function. (A compiled "
            "module runs as it was written if it is the one that is captured: "
            "capture(compiled).) "
        )
    return (
        "No module with any of them was called inside the capture: was the forward "
        "pass run before it? "
    )
