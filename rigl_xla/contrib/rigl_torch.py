"""What is known of rigl-torch 0.5.2: its states and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rigl_xla.layers.weights import Weight
from rigl_xla.topology.masks import pack
from xla_replica.common.names import unwrapped


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
            layers[weight.name] = {**entry, "mask": bits, "ever_active": bits}
    return {
        "step": int(state["step"]),
        "num_updates": int(state["rigl_steps"]),
        "options": {
            "delta": hyperparams["delta_T"],
            **{n: hyperparams[n] for n in ("T_end", "alpha", "grad_accumulation_n")},
            "dense_allocation": state["dense_allocation"],
            "ignore_linear_layers": bool(hyperparams["ignore_linear_layers"]),
            "static_topo": bool(hyperparams["static_topo"]),
            "structure": None,
            "bound_new_steps": False,
            "from_rigl_torch": True,
        },
        "layers": layers,
        "dense": [weight.name for weight in weights if weight.name not in layers],
    }


def weights_of(model: nn.Module) -> list[Weight]:
    """Returns the weights that rigl-torch 0.5.2 makes sparse, in its order.

    That is every module with a weight but `BatchNorm2d`, and nothing inside of one.
    """
    names = {id(p): unwrapped(name) for name, p in model.named_parameters()}

    def of(module: nn.Module) -> list[Weight]:
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and type(module) is not nn.BatchNorm2d:
            is_conv, name = not isinstance(module, nn.Linear), names[id(weight)]
            return [Weight(name, weight, module, "weight", is_conv)]
        return [each for child in module.children() for each in of(child)]

    return of(model)
