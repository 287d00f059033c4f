"""Where gradients go that come to parameters in one backward pass."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xla_replica import traits

# So many numbers take less time to be copied into one row than to be visited where
# they are, parameter after parameter: 4 MiB in float32.
COPIED = 2**20


class KeptGradients:
    """Keeps every gradient as it came.

    Autograd copies a gradient that somebody keeps before it adds to it, so that no
    other copy is needed, and no Python runs in the pass.

    Attributes:
        hooks: What takes the gradients of each parameter.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._found: list[list[Tensor]] = [[] for _ in parameters]
        self.hooks: list[Callable[[Tensor], None]] = [
            found.append for found in self._found
        ]

    def begin(self) -> None:
        """Forgets what came in another pass."""
        for found in self._found:
            found.clear()

    def any_came(self) -> bool:
        """Returns whether there is a gradient since `begin`."""
        return any(self._found)

    def take(self) -> list[Tensor]:
        """Returns the sum of what came to each parameter, ``(1, *shape)``."""
        sums = [_sum(*each) for each in zip(self._parameters, self._found)]
        self.begin()
        return [each.unsqueeze(0) for each in sums]


class CopiedGradients:
    """Copies gradients into one row while they are still in the processor's cache.

    Autograd then keeps none of them and need not copy any. The row is used again in the
    next pass, unless somebody has kept it.

    Attributes:
        hooks: What takes the gradients of each parameter.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._came: set[int] = set()  # the numbers of parameters
        self._make_row()

    def _make_row(self) -> None:
        like = [parameter.dtype for parameter in self._parameters]
        sizes = [parameter.numel() for parameter in self._parameters]
        dtype = functools.reduce(torch.promote_types, like)
        self._row = torch.empty(1, sum(sizes), dtype=dtype)
        self._places = [
            part.view(parameter.shape)
            for part, parameter in zip(self._row.split(sizes, 1), self._parameters)
        ]
        self.hooks = [
            functools.partial(_copy, place, self._came, number)
            for number, place in enumerate(self._places)
        ]
        self._storage = self._row.untyped_storage()
        self._own = self._references()

    def _references(self) -> tuple[int, int]:
        """Returns how many there are to the row, and to its memory."""
        in_memory = torch._C._storage_Use_Count(self._storage._cdata)
        return sys.getrefcount(self._row), in_memory

    def begin(self) -> None:
        """Forgets what came in another pass."""
        self._came.clear()
        if self._references() != self._own:
            self._make_row()

    def any_came(self) -> bool:
        """Returns whether there is a gradient since `begin`."""
        return bool(self._came)

    def take(self) -> Tensor:
        """Returns the sums of what came, ``(1, columns)``, parameter after parameter.

        Who changes it changes what the next pass brings to nobody.
        """
        if len(self._came) < len(self._places):
            for number, place in enumerate(self._places):
                if number not in self._came:
                    place.zero_()
        return self._row


def arrivals(parameters: Sequence[Tensor]) -> KeptGradients | CopiedGradients:
    """Returns where the gradients of these parameters go."""
    size = sum(parameter.numel() for parameter in parameters)
    on_host = all(traits(parameter).is_host for parameter in parameters)
    small = size <= COPIED and on_host
    return (CopiedGradients if small else KeptGradients)(parameters)


def _copy(place: Tensor, came: set[int], number: int, gradient: Tensor) -> None:
    """Copies, or adds, a gradient of the parameter with this number to its place."""
    if gradient.requires_grad or gradient.is_sparse:
        gradient = gradient.detach().to_dense()
    if number in came:  # where a pass runs within the pass
        place.add_(gradient)
    else:
        place.copy_(gradient)
        came.add(number)


def _sum(parameter: Tensor, gradients: list[Tensor]) -> Tensor:
    """Returns the sum of what came to a parameter, of which nothing may have come."""
    if not gradients:  # the losses do not depend on it
        return torch.zeros_like(parameter)
    total, *others = gradients  # several, where a pass runs within the pass
    for each in others:
        total = total + each
    return total.detach().to_dense() if total.is_sparse else total.detach()
