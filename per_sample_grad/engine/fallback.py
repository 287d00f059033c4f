"""Parameters that no rule accounts for: exact gradients at a price, or an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn

import torch
from torch import nn

import xla_replica
from per_sample_grad.engine import graph
from per_sample_grad.errors import CoverageError


def loop(
    losses: torch.Tensor, params: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Returns gradients ``(B, *shape)`` by name, from B backward passes of the batch.

    They are exact for whatever autograd can do. The graph is kept.
    """
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    inputs = list(params.values())
    rows = [xla_replica.grad(loss, inputs, **options) for loss in losses.unbind()]
    return {
        name: torch.stack([x.to_dense() if x.is_sparse else x for x in column])
        for name, column in zip(params, zip(*rows))
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
    raise CoverageError(
        "these parameters have uses that no layer rule accounts for:"
        f"{lines}\n{remark}Register a rule for the module "
        "(register_rule, the cheapest), leave the parameters out (params=), or pass "
        'fallback="loop" (B backward passes of the batch)'
    )


def _why_uncalled(losses: torch.Tensor) -> str:
    """Returns the likely cause where no module's hook has run."""
    names = {node.name() for node in graph.backward_nodes(losses.grad_fn)}
    if "CompiledFunctionBackward" in names:
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
