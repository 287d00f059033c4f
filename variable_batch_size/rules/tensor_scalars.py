"""Lets any torch optimizer take its learning rate as a tensor on the device.

Torch's optimizers hand the learning rate to operators as ``alpha=`` or ``value=``. A
tensor there is read back to the host, once per parameter and step; a Python number is
compiled into the program whenever it is 0, 1 or -1 or equals another one. Inside
`TensorScalars` such a call becomes the equal one that takes a tensor operand. So does
a division by a number: Adam's bias corrections change at every step, and become exactly
one in the end, which would be another program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor

_REWRITES: dict[Any, tuple[str, Callable[..., Tensor]]] = {
    # Not addcmul: a lazy backend takes ten times as long to trace it.
    Tensor.add_: ("alpha", lambda x, y, scalar: x.add_(y * scalar)),
    Tensor.add: ("alpha", lambda x, y, scalar: x.add(y * scalar)),
    torch.add: ("alpha", lambda x, y, scalar: x.add(y * scalar)),
    Tensor.addcmul_: ("value", lambda x, y, z, scalar: x.addcmul_(y * scalar, z)),
    Tensor.addcdiv_: ("value", lambda x, y, z, scalar: x.addcdiv_(y * scalar, z)),
}


class TensorScalars(TorchFunctionMode):
    """Inside, ``alpha=`` and ``value=`` of in-place updates may be tensors.

    Args:
        upload: From a number and a dtype to a tensor of shape ``(1,)`` on the device;
            divisors go through it. Default: they stay numbers.

    >>> with TensorScalars():
    ...     torch.ones(2).add_(torch.ones(2), alpha=torch.tensor(0.5))
    tensor([1.5000, 1.5000])
    """

    def __init__(
        self, upload: Callable[[float, torch.dtype], Tensor] | None = None
    ) -> None:
        super().__init__()
        self._upload = upload
        self._divisors: dict[tuple[float, torch.dtype, bool], Tensor] = {}
        # Optimizers negate one learning rate again for every parameter.
        self._negatives: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        del types
        if not kwargs:
            if func is Tensor.__neg__:
                return self._negative(args[0])
            if func is Tensor.div and self._upload and isinstance(args[1], float):
                return func(args[0], self._divisor(args[0], args[1]))
            return func(*args)
        if func in _REWRITES:
            name, rewritten = _REWRITES[func]
            if isinstance(kwargs.get(name), Tensor):
                kwargs = dict(kwargs)
                return rewritten(*args, kwargs.pop(name), **kwargs)
        return func(*args, **kwargs)

    def _negative(self, number: Tensor) -> Tensor:
        if number.dim():
            return -number
        if id(number) not in self._negatives:
            self._negatives[id(number)] = (number, -number)  # kept, so its id is
        return self._negatives[id(number)][1]

    def _divisor(self, tensor: Tensor, number: float) -> Tensor:
        """By use, too: two that are equal now and then would make another program."""
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        key = (number, dtype, tensor.dim() == 0)
        if key not in self._divisors:
            self._divisors[key] = self._upload(number, dtype)
        divisor = self._divisors[key]
        return divisor if tensor.dim() else divisor.reshape(())
