"""What is known of rigl-torch 0.5.2: its names, its states and their weights."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer, zero_inactive_
from rigl_xla.layers.weights import Weight, clean
from rigl_xla.topology.masks import pack
from rigl_xla.topology.update_schedule import UpdateSchedule
from rigl_xla.update.steps import TopologySteps
from rigl_xla.update.topology_update import optimizer_state_of
from xla_replica import Replica
from xla_replica.common.arguments import check_integer


def _of(part: str, name: str) -> property:
    """Returns a property that reads an attribute of the schedule or the options."""
    doc = f"What `{name}` of the {part} is."
    return property(operator.attrgetter(f"{part}.{name}"), doc=doc)


class RigLTorchNames:
    """Attributes and methods of rigl-torch's scheduler, read off this one's."""

    model: nn.Module
    optimizer: Optimizer
    options: Options
    schedule: UpdateSchedule
    replica: Replica
    _layers: list[SparseLayer]
    _steps: TopologySteps

    # `RigLScheduler` says what they mean.
    T_end = _of("schedule", "T_end")
    delta_T = _of("schedule", "delta")
    alpha = _of("schedule", "alpha")
    grad_accumulation_n = _of("schedule", "grad_accumulation_n")
    dense_allocation = _of("options", "dense_allocation")
    sparsity_distribution = _of("options", "sparsity_distribution")
    ignore_linear_layers = _of("options", "ignore_linear_layers")
    static_topo = _of("options", "static_topo")

    @property
    def step(self) -> int:
        """The number of the last step."""
        return self._steps.number

    @step.setter
    def step(self, number: int) -> None:
        self._steps.number = check_integer("step", number, least=0)

    @property
    def rigl_steps(self) -> int:
        """How many updates of the topology there were."""
        return self._steps.num_updates

    @property
    def W(self) -> list[nn.Parameter]:
        """All weights that can be sparse, dense ones too, in order of registration."""
        return [weight.parameter for weight in self._steps.weights]

    @property
    def N(self) -> list[int]:
        """Number of weights in each of `W`."""
        return [parameter.numel() for parameter in self.W]

    @property
    def S(self) -> list[float]:
        """Sparsity of each of `W`."""
        found = {layer.name: layer.sparsity for layer in self._layers}
        return [found.get(weight.name, 0.0) for weight in self._steps.weights]

    @property
    def backward_masks(self) -> list[torch.Tensor | None]:
        """Mask of each of `W`; None where it is dense."""
        found = {layer.name: layer.mask for layer in self._layers}
        return [found.get(weight.name) for weight in self._steps.weights]

    def cosine_annealing(self) -> float:
        """Returns the drop fraction of an update at this step."""
        return self.schedule.drop_fraction(self.step)

    @torch.no_grad()
    def apply_mask_to_weights(self) -> None:
        """Zeroes inactive weights; done after every optimizer step anyway."""
        for layer in self._layers:
            layer.mask_()

    @torch.no_grad()
    def apply_mask_to_gradients(self) -> None:
        """Zeroes gradients of inactive weights, as the backward pass does anyway.

        For gradients that are assigned by hand, before somebody clips them: what an
        update needs of them is collected first.
        """
        self._steps.collect_assigned(self.replica)
        for layer in self._layers:
            gradient = layer.weight.parameter.grad
            if gradient is not None and layer.hooked:
                zero_inactive_(gradient.detach(), layer.mask)

    @torch.no_grad()
    def reset_momentum(self) -> None:
        """Zeroes what the optimizer keeps for inactive weights."""
        for layer in self._layers:
            for tensor in optimizer_state_of(layer.weight.parameter, self.optimizer):
                layer.follow(tensor.device)
                zero_inactive_(tensor, layer.mask)


def is_state(state: Mapping[str, Any]) -> bool:
    """Returns whether rigl-torch has saved this state."""
    return "backward_masks" in state and "hyperparams" in state


def converted(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Returns a state of rigl-torch, whose masks are tensors by position, as ours.

    Raises:
        ValueError: The state is of another model.
    """
    hyperparams, weights = state["hyperparams"], weights_of(model)
    sizes = [weight.parameter.numel() for weight in weights]
    if sizes != list(state["N"]):
        raise ValueError(
            f"the rigl-torch state_dict is of weights of {list(state['N'])} numbers; "
            f"this model has {sizes}"
        )
    layers = {}
    for weight, sparsity, mask in zip(weights, state["S"], state["backward_masks"]):
        if mask is not None:
            bits = pack(mask.detach().to("cpu", torch.bool, copy=True))
            entry = {"shape": list(mask.shape), "sparsity": float(sparsity)}
            layers[weight.name] = {**entry, "mask": bits}
    return {
        "step": int(state["step"]),
        "num_updates": int(state["rigl_steps"]),
        "schedule": {
            "T_end": hyperparams["T_end"],
            "delta": hyperparams["delta_T"],
            "alpha": hyperparams["alpha"],
            "grad_accumulation_n": hyperparams["grad_accumulation_n"],
        },
        "options": {
            "dense_allocation": state["dense_allocation"],
            "ignore_linear_layers": bool(hyperparams["ignore_linear_layers"]),
            "static_topo": bool(hyperparams["static_topo"]),
            "structure": None,
            "from_rigl_torch": True,
        },
        "layers": layers,
    }


def weights_of(model: nn.Module) -> list[Weight]:
    """Returns what rigl-torch 0.5.2 takes for the layers of a model, in its order.

    That is every module with a weight but `BatchNorm2d`, and nothing inside of one.
    """
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    found = []

    def visit(module: nn.Module) -> None:
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and type(module) is not nn.BatchNorm2d:
            is_conv, name = not isinstance(module, nn.Linear), names[id(weight)]
            found.append(Weight(name, weight, module, "weight", is_conv))
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return found
