"""States of rigl-torch 0.5.2, and the weights that they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rigl_xla.layers.history import History
from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer, like
from rigl_xla.layers.weights import Weight, clean
from rigl_xla.state.found import Found, check_shape
from rigl_xla.topology.update_schedule import UpdateSchedule


def read_rigl_torch(
    state: Mapping[str, Any],
    model: nn.Module,
    options: Options,
    schedule: UpdateSchedule,
    changes: Mapping[str, Any],
) -> Found:
    """Masks are by position there; counts are taken from them."""
    saved = state["hyperparams"]
    positions = rigl_torch_weights(model)
    masks = list(state["backward_masks"])
    if [w.parameter.numel() for w in positions] != list(state["N"]):
        raise ValueError(
            f"the rigl-torch state_dict is of weights of {list(state['N'])} numbers; "
            f"this model has {[w.parameter.numel() for w in positions]}"
        )
    options = dataclasses.replace(
        options,
        dense_allocation=state["dense_allocation"],
        ignore_linear_layers=bool(saved["ignore_linear_layers"]),
        static_topo=bool(saved["static_topo"]),
        from_rigl_torch=True,
    )
    values = {
        **dataclasses.asdict(schedule),
        "T_end": saved["T_end"],
        "delta": saved["delta_T"],
        "alpha": saved["alpha"],
        "grad_accumulation_n": saved["grad_accumulation_n"],
        **changes,
    }
    layers = []
    for weight, sparsity, mask in zip(positions, state["S"], masks):
        if mask is None:
            continue
        check_shape(weight, tuple(mask.shape))
        own = mask.detach().to("cpu", torch.bool, copy=True)
        active, mask = int(own.sum()), like(weight.parameter, own)
        history = History.begin(mask, active)
        layers.append(SparseLayer(weight, float(sparsity), active, mask, history))
    return Found(
        positions,
        layers,
        options,
        UpdateSchedule(**values),
        int(state["step"]),
        int(state["rigl_steps"]),
    )


def rigl_torch_weights(model: nn.Module) -> list[Weight]:
    """What rigl-torch 0.5.2 takes for the layers of a model, in its order.

    Every module with a weight but `BatchNorm2d`; it looks into no such module.
    """
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    found = []

    def visit(module: nn.Module) -> None:
        weight = getattr(module, "weight", None)
        is_norm = type(module) is nn.BatchNorm2d
        if isinstance(weight, nn.Parameter) and not is_norm:
            is_conv = not isinstance(module, nn.Linear)
            name = names[id(weight)]
            found.append(Weight(name, weight, module, "weight", is_conv))
            return
        for child in module.children():
            visit(child)

    visit(model)
    return found
