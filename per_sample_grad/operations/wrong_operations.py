"""Operations whose gradient is wrong on lazy devices, by torch's own autograd.

A comparison with autograd cannot find them. `WRONG` has all that were found among the
operations of `torch.nn` and of torch: the XLA backend of torch 2.9 ignores whether the
backward pass of ELU is given its input or its output. In place it is given the output,
as that backend expects, and is right.

Modules are computed by other operations inside a capture, as are normalisations by
running statistics, whose backward pass raises there ("The size of mean should be
compatible with feature count"). A functional call cannot be replaced, so that it is an
error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

import xla_replica
from per_sample_grad.errors import PerSampleError
from per_sample_grad.layers import normalisation

# Of SELU, as torch has them (Klambauer et al., arXiv:1706.02515).
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


@dataclasses.dataclass(frozen=True)
class WrongOperation:
    """An operation whose gradient is wrong on lazy devices.

    Attributes:
        node: Its name in autograd's graph.
        fault: What its gradient is and what it should be.
        replacement: What to write in place of the function, with the same numbers.
        formula: The same for a module and its input.
    """

    node: str
    fault: str
    replacement: str
    formula: Callable[[Any, torch.Tensor], torch.Tensor]


def _exponential(x: torch.Tensor, alpha: float, inner: float = 1.0) -> torch.Tensor:
    """Returns ``x`` where that is positive, elsewhere ``alpha expm1(x / inner)``."""
    # With a large x itself the gradient is 0 times infinity, which is NaN. And that of
    # x.clamp(max=0) at zero is 1, or from torch 2.15 on 0.
    negative = torch.where(x > 0, 0, x)
    return torch.where(x > 0, x, alpha * torch.expm1(negative / inner))


# By module: the function in `torch.nn.functional` has the same name in lower case.
WRONG: dict[type[nn.Module], WrongOperation] = {
    nn.ELU: WrongOperation(
        "EluBackward0",
        "x + 1 below zero, not alpha exp(x)",
        "torch.where(x > 0, x, alpha * torch.expm1(torch.where(x > 0, 0, x)))",
        lambda module, x: _exponential(x, module.alpha),
    ),
    nn.CELU: WrongOperation(
        "CeluBackward0",
        "x + 1 below zero, not exp(x / alpha)",
        "torch.where(x > 0, x, alpha * torch.expm1(torch.where(x > 0, 0, x) / alpha))",
        lambda module, x: _exponential(x, module.alpha, module.alpha),
    ),
    nn.SELU: WrongOperation(
        "EluBackward0",
        "x + 1 below zero, not 1.758 exp(x), and 1 above, not 1.051",
        "1.0507009873554805 * torch.where(x > 0, x, "
        "1.6732632423543772 * torch.expm1(torch.where(x > 0, 0, x)))",
        lambda module, x: _SELU_SCALE * _exponential(x, _SELU_ALPHA),
    ),
}


def right_output(
    module: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: torch.Tensor,
) -> torch.Tensor | None:
    """Returns, as a forward hook, the same numbers with the right gradient.

    The module's own operation never runs: nothing asks a lazy device for its result.
    """
    if isinstance(module, normalisation.NORMALISING):
        is_right = normalisation.uses_batch_statistics(module)
        formula = normalisation.scaled_by_running_statistics
    else:
        is_right, formula = module.inplace, WRONG[type(module)].formula
    if is_right or not xla_replica.traits(output).is_lazy:
        return None
    return formula(module, args[0] if args else kwargs["input"]).to(output.dtype)


def refuse_wrong_operations(names: Collection[str]) -> None:
    """Raises PerSampleError if a lazy device's graph has one of these operations."""
    found = [
        f"\n  {kind.__name__.lower()}: the gradient is {each.fault}; write "
        f"{each.replacement}, call the module torch.nn.{kind.__name__} (which is "
        "replaced while capturing), or pass inplace=True, whose gradient is right"
        for kind, each in WRONG.items()
        if each.node in names
    ]
    if found:
        raise PerSampleError(
            "the losses depend on operations whose gradient is wrong on this device, "
            f"in ordinary training too:{''.join(found)}"
        )
