"""Numbers that change from step to step, as tensors on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_replica import Replica

Tensor = torch.Tensor


class DeviceScalars:
    """Changing numbers on the device, each uploaded once per value and use.

    Two uses never share a tensor: where their values happened to be equal, a lazy
    backend would compile another program. Beyond ``capacity`` values the one that was
    not used for longest is dropped, and is uploaded again when it returns.

    Attributes:
        get: From a use, a number and a dtype to a tensor of shape ``(1,)``; or from a
            matrix, a tuple of tuples. Do not change it.
    """

    def __init__(self, replica: Replica, capacity: int = 1024) -> None:
        # Of a function without `self`, so that tensors are freed with this object.
        self.get = functools.lru_cache(capacity)(functools.partial(_made, replica))


def _made(
    replica: Replica, use: object, value: Any, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns a number, or a matrix, on the device; ``use`` sets tensors apart."""
    del use
    if not isinstance(value, tuple):
        return replica.scalar(value, dtype)
    if replica.is_lazy:
        return replica.send(torch.tensor(value, dtype=dtype))
    # Sending the matrix would wait for the device, as `Replica.scalar` explains.
    numbers = [replica.scalar(x, dtype) for row in value for x in row]
    return torch.cat(numbers).reshape(len(value), -1)


def dtype_for(parameters: Iterable[Tensor]) -> torch.dtype:
    """Returns float64 if a parameter has numbers of it, else float32."""
    dtypes = {parameter.dtype.to_real() for parameter in parameters}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def operand_for(tensor: Tensor, number: Any) -> Any:
    """Returns a number, if it is of shape ``(1,)`` as an operand that fits ``tensor``.

    With a dimension it keeps its precision beside a narrower dtype.
    """
    is_wide = isinstance(number, Tensor) and not tensor.dim()
    return number.reshape(()) if is_wide else number


def as_floats(values: tuple[Any, ...], replica: Replica) -> tuple[float, ...]:
    """Returns the values as floats; reads those that are tensors in one transfer."""
    if any(isinstance(value, Tensor) for value in values):
        return tuple(tensor.item() for tensor in replica.fetch(list(values)))
    return values


# Torch's optimizers hand the learning rate to operators under these names, as a factor
# of the first operand that is added. A tensor there is read back to the host, once per
# parameter and step; a Python number is compiled into the program whenever it is 0, 1
# or -1 or equals another one.
_SCALARS: dict[Any, str] = {
    **dict.fromkeys((Tensor.add_, Tensor.add, torch.add), "alpha"),
    **dict.fromkeys((Tensor.addcmul_, Tensor.addcdiv_), "value"),
}


class TensorScalars(TorchFunctionMode):
    """A mode in which any torch optimizer takes its learning rate as a tensor.

    Calls with a tensor as ``alpha=`` or ``value=`` become the equal ones with a tensor
    operand. With ``divisors`` so does a division by a number: Adam's bias corrections
    change at every step and become exactly one in the end, which would be another
    program.

    >>> with TensorScalars():
    ...     torch.ones(2).add_(torch.ones(2), alpha=torch.tensor(0.5))
    tensor([1.5000, 1.5000])
    """

    def __init__(self, divisors: DeviceScalars | None = None) -> None:
        super().__init__()
        self._divisors = divisors
        # Optimizers negate one learning rate again for every parameter.
        self._negative = functools.cache(torch.neg)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        del types
        kwargs = kwargs or {}
        if func is Tensor.__neg__ and args[0].dim() == 0:
            return self._negative(args[0])
        if func is Tensor.div and self._divisors and isinstance(args[1], float):
            use = "divisor of an optimizer", args[0].dim() == 0
            number = self._divisors.get(use, args[1], dtype_for(args[:1]))
            return func(args[0], operand_for(args[0], number), **kwargs)
        scalar = kwargs.get(_SCALARS.get(func))
        if isinstance(scalar, Tensor):  # not addcmul, which is traced ten times slower
            x, y, *more = args
            rest = {n: kwargs[n] for n in kwargs if kwargs[n] is not scalar}
            return func(x, y * scalar, *more, **rest)
        return func(*args, **kwargs)
