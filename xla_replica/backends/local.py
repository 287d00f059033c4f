"""The only replica of its job, and the device that a replica uses by default."""

from __future__ import annotations

import torch

from xla_replica.backends.replica import Replica
from xla_replica.device.device_traits import traits


class LocalReplica(Replica):
    """The only replica of its job, whose sums are its own tensors.

    Args:
        device: Default: the accelerator if there is one, else the CPU.
        reason: Why it is alone, for people: what `str` of it shows.
    """

    def __init__(
        self, device: torch.device | str | None = None, reason: str = "no other replica"
    ) -> None:
        chosen = in_use(default_device()) if device is None else torch.device(device)
        super().__init__(0, 1, chosen, reason)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().unsqueeze(0)


def default_device() -> torch.device:
    """Returns torch's accelerator (a CUDA GPU, a TPU under TorchTPU), else the CPU.

    It has no index; see `in_use`.
    """
    # A CUDA build without a GPU names "cuda" as its accelerator: ask if it is there.
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def in_use(kind: torch.device) -> torch.device:
    """Returns the device of this kind that the calling thread uses, with its index.

    Every thread has its own, so without an index a loader's thread would take another
    one, the first.

    Args:
        kind: The CPU, or torch's accelerator without an index.
    """
    if traits(kind).is_host:
        return kind
    return torch.device(kind.type, torch.accelerator.current_device_index())
