"""What a kind of device is like, for code that chooses between two ways of computing.

Only this file and the backends know kinds of devices by name. A backend for another
kind adds a row with `register_device`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from xla_replica.common.arguments import check_type
from xla_replica.device.explicit_precision import HighestProducts


class DeviceTraits(NamedTuple):
    """What code may ask about a device, in place of its name.

    Attributes:
        is_host: The device is this CPU: reading a value costs nothing, so a branch on
            data is allowed.
        is_lazy: Operations are recorded and compiled with the Python numbers in them:
            a number that changes has to be a tensor, and shapes must not vary.
        full_precision: Returns a context manager inside which float32 matrix products
            keep all their digits, see `full_matmul_precision`.
        bfloat16_precision: Returns one in which they keep those of bfloat16 numbers.
        has_streams: Work on one ``torch.Stream`` runs beside that on another, and a
            copy from pinned memory does not make the host wait.
    """

    is_host: bool = False
    is_lazy: bool = False
    full_precision: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    bfloat16_precision: Callable[[], AbstractContextManager[None]] = (
        contextlib.nullcontext
    )
    has_streams: bool = False


@contextlib.contextmanager
def _in_torch(precision: str = "highest") -> Iterator[None]:
    """Surrounds a block in which this is torch's float32 matmul precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _on_gpus(precision: str, in_torch: str) -> Iterator[None]:
    """Surrounds a block in which products on GPUs are "ieee", or "tf32"."""
    # torch has an older and a newer setting. The older one, if it has been used, sets
    # the newer one too, and then must not differ from it: reading it would raise.
    matmul = torch.backends.cuda.matmul
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
        with contextlib.suppress(RuntimeError):  # only the newer one has been used
            stack.enter_context(_in_torch(in_torch))
        matmul.fp32_precision = precision
        yield


_TRAITS = {
    "cpu": DeviceTraits(is_host=True),
    "cuda": DeviceTraits(
        full_precision=functools.partial(_on_gpus, "ieee", "highest"),
        bfloat16_precision=functools.partial(_on_gpus, "tf32", "high"),
        has_streams=True,
    ),
    "xla": DeviceTraits(is_lazy=True, full_precision=HighestProducts),
    # TorchTPU makes torch's setting its own: "medium", which is bfloat16, by default.
    "tpu": DeviceTraits(full_precision=_in_torch),
}


def traits(where: torch.device | torch.Tensor) -> DeviceTraits:
    """Returns the traits of a device, or of the device of a tensor.

    A kind without a row is taken for an eager accelerator, such as a GPU.

    Args:
        where: A ``torch.device``, or a tensor on it.
    """
    device = where.device if isinstance(where, torch.Tensor) else where
    return _TRAITS.get(device.type, DeviceTraits())


def register_device(kind: str, traits: DeviceTraits) -> None:
    """Adds or replaces the traits of a kind of device.

    Args:
        kind: A ``torch.device.type``, such as ``"cuda"``.
        traits: What its devices can do.
    """
    check_type("kind", kind, str, "a torch.device.type such as 'cuda'")
    _TRAITS[kind] = check_type("traits", traits, DeviceTraits, "DeviceTraits")


def full_matmul_precision(
    device: torch.device, *, of_bfloat16: bool = False
) -> AbstractContextManager[None]:
    """Returns a context in which float32 matrix products are not rounded to fewer bits.

    On a GPU there is no TF32 inside, under TorchTPU torch's float32 matmul precision is
    "highest", and afterwards the setting is what it was before.
    On torch_xla, whose own precision is the process's and on a TPU that of bfloat16 by
    default, each product of float32 inside is written into the program as one of
    "highest" precision: ``@``, ``matmul``, ``mm``, ``bmm``, ``mv``, ``dot``, ``addmm``,
    ``addmm_``, ``baddbmm`` and ``linear`` of tensors that need no gradient. Nothing
    else changes, neither the process's precision nor that of a pass of training.

    Args:
        device: Where the products are computed. Nothing happens on a CPU.
        of_bfloat16: Whether what is multiplied was computed in bfloat16, so that fewer
            bits lose nothing: 11 in TF32 on a GPU; elsewhere the precision stays that
            of training.
    """
    kind = traits(device)
    return kind.bfloat16_precision() if of_bfloat16 else kind.full_precision()
