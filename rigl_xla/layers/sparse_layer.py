"""A weight that is kept sparse: its mask, and the gradient it has collected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from rigl_xla.layers.history import History
from rigl_xla.layers.weights import Weight
from rigl_xla.topology import masks
from rigl_xla.topology.structure import Rows
from xla_replica import Replica


@dataclasses.dataclass(eq=False)
class SparseLayer:
    """A weight with its mask, and the dense gradient it has collected.

    Attributes:
        weight: Where the parameter is.
        sparsity: What it is to have.
        num_active: Connections it is to have now.
        mask: bool of the weight's shape, True where active.
        history: Where its connections have been.
        rows: The pattern its mask keeps, if any.
        pending: This replica's dense gradient of the step under way, summed over
            backward passes.
        gradient: The dense gradient of earlier steps, over all replicas.
    """

    weight: Weight
    sparsity: float
    num_active: int
    mask: torch.Tensor
    history: History
    rows: Rows | None = None
    pending: torch.Tensor | None = None
    gradient: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.weight.name

    @property
    def data(self) -> torch.Tensor:
        """The parameter, detached."""
        return self.weight.parameter.detach()

    @property
    def size(self) -> int:
        """Number of weights, active or not."""
        return self.weight.parameter.numel()

    def follow(self, device: torch.device) -> None:
        """Moves the mask to where the parameter is."""
        if self.mask.device != device:
            self.mask = self.mask.to(device)
            self.history.follow(device)

    def add(self, dense: torch.Tensor, after_finite: bool) -> None:
        """Adds a backward pass's dense gradient to what is pending.

        Args:
            dense: The gradient; copied, as autograd may have given it to others too.
            after_finite: Drop what is pending if it is not finite.
        """
        before = self.pending
        if before is not None and after_finite:
            zero = before.new_zeros(())
            before = torch.where(masks.is_finite(before), before, zero)
        self.pending = dense.clone() if before is None else before + dense


def like(parameter: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask on the parameter's device, and in its memory format.

    What is chosen by a mask has its format: a contiguous one would turn gradients of
    channels-last weights contiguous.
    """
    mask = mask.contiguous().to(parameter.device)
    if parameter.is_contiguous():
        return mask
    return torch.empty_like(parameter.detach(), dtype=torch.bool).copy_(mask)


def to_host(tensors: Sequence[torch.Tensor], replica: Replica) -> list[torch.Tensor]:
    """Copies on the CPU, in one transfer where the backend can."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.detach().clone() for tensor in tensors]
    return replica.fetch(tensors)


def keep_(tensor: torch.Tensor, mask: torch.Tensor) -> None:
    """Zeroes ``tensor``, in place, where ``mask`` is False; NaN too."""
    zero = tensor.new_zeros(())
    if tensor.device.type in ("cpu", "cuda"):  # half the time of a copy
        torch.where(mask, tensor, zero, out=tensor)
    else:
        tensor.copy_(torch.where(mask, tensor, zero))
