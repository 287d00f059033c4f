"""Operations whose gradient is wrong on lazy devices, by torch's own autograd.

A comparison with autograd cannot find them. `WRONG` has all that were found among the
operations of `torch.nn` and of torch: the XLA backend of torch 2.9 ignores whether the
backward pass of ELU is given its input or its output. In place it is given the output,
as that backend expects, and is right.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from per_sample_grad.errors import PerSampleError


class WrongOperation(NamedTuple):
    """A function of `torch.nn.functional` whose gradient is wrong on lazy devices.

    Attributes:
        name: Its name.
        node: The name in autograd's graph.
        fault: What its gradient is and what it should be.
        replacement: What to write in its place, with the same numbers.
    """

    name: str
    node: str
    fault: str
    replacement: str


WRONG = (
    WrongOperation(
        "elu",
        "EluBackward0",
        "x + 1 below zero, not alpha exp(x)",
        "torch.where(x > 0, x, alpha * torch.expm1(torch.where(x > 0, 0, x)))",
    ),
    WrongOperation(
        "celu",
        "CeluBackward0",
        "x + 1 below zero, not exp(x / alpha)",
        "torch.where(x > 0, x, alpha * torch.expm1(torch.where(x > 0, 0, x) / alpha))",
    ),
    WrongOperation(
        "selu",
        "EluBackward0",
        "x + 1 below zero, not 1.758 exp(x), and 1 above, not 1.051",
        "1.0507009873554805 * torch.where(x > 0, x, "
        "1.6732632423543772 * torch.expm1(torch.where(x > 0, 0, x)))",
    ),
)


def refuse_wrong_operations(names: Collection[str]) -> None:
    """Raises PerSampleError if a lazy device's graph has one of these operations."""
    found = [
        f"\n  {each.name}: the gradient is {each.fault}; pass inplace=True, whose "
        f"gradient is right, or write {each.replacement}"
        for each in WRONG
        if each.node in names
    ]
    if found:
        raise PerSampleError(
            "the losses depend on operations whose gradient is wrong on this device, "
            f"in ordinary training too:{''.join(found)}"
        )
