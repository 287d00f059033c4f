"""Names that users of rigl-torch 0.5.2 know a scheduler by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rigl_xla.layers.sparse_layer import keep_
from rigl_xla.update.topology_update import optimizer_state_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from rigl_xla.layers.options import Options
    from rigl_xla.layers.sparse_layer import SparseLayer
    from rigl_xla.layers.weights import Weight
    from rigl_xla.topology.update_schedule import UpdateSchedule


class RigLTorchNames:
    """Attributes and methods of rigl-torch's scheduler, read off this one's."""

    model: nn.Module
    optimizer: Optimizer
    options: Options
    schedule: UpdateSchedule
    step: int
    rigl_steps: int
    _weights: list[Weight]
    _layers: list[SparseLayer]

    @property
    def W(self) -> list[nn.Parameter]:
        """All weights that can be sparse, dense ones too, in order of registration."""
        return [weight.parameter for weight in self._weights]

    @property
    def N(self) -> list[int]:
        """Number of weights in each of `W`."""
        return [parameter.numel() for parameter in self.W]

    @property
    def S(self) -> list[float]:
        """Sparsity of each of `W`."""
        found = {layer.name: layer.sparsity for layer in self._layers}
        return [found.get(weight.name, 0.0) for weight in self._weights]

    @property
    def backward_masks(self) -> list[torch.Tensor | None]:
        """Mask of each of `W`; None where it is dense."""
        found = {layer.name: layer.mask for layer in self._layers}
        return [found.get(weight.name) for weight in self._weights]

    @property
    def delta_T(self) -> int:
        """Steps between topology updates."""
        return self.schedule.delta

    @property
    def alpha(self) -> float:
        """Drop fraction at step 0."""
        return self.schedule.alpha

    @property
    def T_end(self) -> int | None:
        """Step from which on the topology stays."""
        return self.schedule.T_end

    @property
    def grad_accumulation_n(self) -> int:
        """Steps whose gradients score an update."""
        return self.schedule.grad_accumulation_n

    @property
    def dense_allocation(self) -> float:
        """Share of active weights asked for."""
        return self.options.dense_allocation

    @property
    def sparsity_distribution(self) -> Any:
        """How sparsity was distributed over layers."""
        return self.options.sparsity_distribution

    @property
    def ignore_linear_layers(self) -> bool:
        """Whether all but convolutions stay dense."""
        return self.options.ignore_linear_layers

    @property
    def static_topo(self) -> bool:
        """Whether the topology never changes."""
        return self.options.static_topo

    def cosine_annealing(self) -> float:
        """The drop fraction of an update at this step."""
        return self.schedule.drop_fraction(self.step)

    @torch.no_grad()
    def apply_mask_to_weights(self) -> None:
        """Zeroes inactive weights; done behind every optimizer step anyway."""
        for layer in self._layers:
            layer.follow(layer.data.device)
            keep_(layer.data, layer.mask)

    @torch.no_grad()
    def apply_mask_to_gradients(self) -> None:
        """Zeroes gradients of inactive weights; done in the backward pass anyway."""
        for layer in self._layers:
            gradient = layer.weight.parameter.grad
            if gradient is not None:
                layer.follow(gradient.device)
                keep_(gradient.detach(), layer.mask)

    @torch.no_grad()
    def reset_momentum(self) -> None:
        """Zeroes what the optimizer keeps for inactive weights."""
        for layer in self._layers:
            for tensor in optimizer_state_of(layer.weight.parameter, self.optimizer):
                layer.follow(tensor.device)
                keep_(tensor, layer.mask)
