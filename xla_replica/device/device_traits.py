"""What a kind of device is like, for code that chooses between two ways of computing.

The one place that knows kinds of devices by name. A backend for another kind adds a row
by `register_device`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class DeviceTraits(NamedTuple):
    """What code may ask about a device, in place of its name.

    Attributes:
        is_host: The device is this CPU: reading a value costs nothing, so a branch on
            data is allowed.
        is_lazy: Operations are recorded and compiled with the Python numbers in them:
            a number that changes has to be a tensor, and shapes must not vary.
    """

    is_host: bool = False
    is_lazy: bool = False


_TRAITS = {
    "cpu": DeviceTraits(is_host=True),
    "cuda": DeviceTraits(),
    "xla": DeviceTraits(is_lazy=True),
    "tpu": DeviceTraits(is_lazy=True),
}


def traits(where: torch.device | torch.Tensor) -> DeviceTraits:
    """Returns the traits of a device, or of the device of a tensor.

    A kind without a row is taken for an eager accelerator, such as a GPU.
    """
    device = where.device if isinstance(where, torch.Tensor) else where
    return _TRAITS.get(device.type, DeviceTraits())


def register_device(kind: str, traits: DeviceTraits) -> None:
    """Says what devices of a kind are like; ``kind`` is a ``torch.device.type``."""
    _TRAITS[kind] = traits
