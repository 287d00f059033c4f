"""Operations of a lazy device that PyTorch has none for, such as loops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def lazy_operation(build: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Returns a function of a lazy device's tensors, built of XLA's own operations.

    A loop is one operation of the program, whatever the number of its rounds; a loop in
    Python is unrolled, and the compiler's time grows with the number of rounds.

    Args:
        build: From one ``torch_xla.core.xla_builder.Op`` per tensor, and keywords that
            are part of the program, to the Op of the result. The class of an argument
            makes others: ``type(x).scalar(x.builder(), 0, "s32")``. Called once for
            every combination of shapes, dtypes and keywords.
    """

    @functools.cache
    def registered() -> Any:
        from torch_xla.core import xla_op_registry

        return xla_op_registry.register(build.__name__.strip("_"), build)

    def operation(*tensors: torch.Tensor, **keywords: Any) -> Any:
        return registered()(*tensors, **keywords)

    return operation


def computed_once(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, which a program of torch_xla will compute only once.

    XLA repeats what is cheap to compute in everything that reads it, which in several
    large matrix products can take a TPU's compiler seconds. It can also save some:
    measure with ``tools/tpu``.

    Args:
        tensor: On any device; elsewhere than on torch_xla's nothing happens to it.
    """
    if tensor.device.type == "xla":
        import torch_xla

        torch_xla._XLAC._xla_optimization_barrier_([tensor])
    return tensor
