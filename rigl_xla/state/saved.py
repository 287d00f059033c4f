"""What is saved of a pruner, and how it is read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rigl_xla.contrib.rigl_torch_checkpoint import read_rigl_torch, rigl_torch_weights
from rigl_xla.layers.history import History
from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer, like, to_host
from rigl_xla.layers.weights import Weight, weights_of
from rigl_xla.state.found import Found, check_shape
from rigl_xla.topology.update_schedule import UpdateSchedule
from xla_replica import Replica

FORMAT = 1
_KEPT_OPTIONS = (
    "dense_allocation",
    "ignore_linear_layers",
    "static_topo",
    "structure",
    "seed",
    "from_rigl_torch",
)
# The caller may repeat these, and has them from the state otherwise.
_ASKED = ("method", "skip_step", "drop", "grow", "sparsity_distribution")
_FUNCTION = "function "  # what a name cannot give back


def state_of(
    layers: Sequence[SparseLayer],
    options: Options,
    schedule: UpdateSchedule,
    step: int,
    num_updates: int,
    replica: Replica,
    is_collecting: bool,
) -> dict[str, Any]:
    """See `RigLScheduler.state_dict`. Reads the device, in one transfer."""
    bits, gradients = _fetched(layers, replica, is_collecting)
    saved: dict[str, Any] = {}
    for layer, (mask, ever) in zip(layers, bits):
        saved[layer.name] = {
            "shape": list(mask.shape),
            "sparsity": layer.sparsity,
            # Not layer.num_active: gradual pruning may have refused an update.
            "num_active": int(mask.sum()),
            "mask": pack(mask),
            "ever_active": pack(ever),
        }
        if layer.name in gradients:
            saved[layer.name]["gradient"] = gradients[layer.name]
    return {
        "format": FORMAT,
        "step": step,
        "num_updates": num_updates,
        "schedule": dataclasses.asdict(schedule),
        "options": {name: getattr(options, name) for name in _KEPT_OPTIONS},
        "asked": {name: _plain(getattr(options, name)) for name in _ASKED},
        "layers": saved,
    }


def _fetched(
    layers: Sequence[SparseLayer], replica: Replica, is_collecting: bool
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
    """On the CPU: masks with where they have been, and what was collected by name."""
    if not layers:
        return [], {}
    collected = {
        layer.name: layer.gradient.detach()
        for layer in layers
        if is_collecting and layer.gradient is not None
    }
    pairs = [(layer.mask, layer.history.ever) for layer in layers]
    joined = torch.cat([mask.flatten() for pair in pairs for mask in pair])
    flat, *gradients = to_host([joined, *collected.values()], replica)
    parts = flat.split([layer.size for layer in layers for _ in range(2)])
    shaped = [
        (mask.reshape(layer.mask.shape), ever.reshape(layer.mask.shape))
        for layer, mask, ever in zip(layers, parts[::2], parts[1::2])
    ]
    return shaped, dict(zip(collected, gradients))


def pack(mask: torch.Tensor) -> torch.Tensor:
    """uint8: one bit per weight of a mask on the CPU."""
    return torch.from_numpy(np.packbits(mask.numpy().reshape(-1)))


def unpack(packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The bool mask on the CPU that `pack` was given."""
    size = torch.Size(shape).numel()
    bits = np.unpackbits(packed.cpu().numpy(), count=size)
    return torch.from_numpy(bits.astype(np.bool_)).reshape(tuple(shape))


def read(
    state: Mapping[str, Any],
    model: nn.Module,
    options: Options,
    schedule: UpdateSchedule,
    changes: Mapping[str, Any],
) -> Found:
    """Fits a saved state to a model; see `RigLScheduler.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state_dict is a {type(state).__name__}; it must be what "
            "RigLScheduler.state_dict() gave, or rigl-torch 0.5.2's"
        )
    fields = {field.name for field in dataclasses.fields(UpdateSchedule)}
    if not fields.issuperset(changes):
        raise TypeError(
            f"load_state_dict cannot change {sorted(set(changes) - fields)}; allowed "
            f"are {sorted(fields)}"
        )
    if "backward_masks" in state and "hyperparams" in state:
        return read_rigl_torch(state, model, options, schedule, changes)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"state_dict has format {state.get('format')!r} and keys {sorted(state)}; "
            f"this release reads its own format {FORMAT} and rigl-torch 0.5.2's states"
        )
    asked = _merged(options, state.get("asked", {}))
    options = dataclasses.replace(options, **state["options"], **asked)
    schedule = UpdateSchedule(**{**state["schedule"], **changes})
    if options.from_rigl_torch:
        weights = rigl_torch_weights(model)
    else:
        weights = weights_of(model, options.include, options.exclude)
    layers = _fit(state["layers"], weights, options)
    return Found(
        weights, layers, options, schedule, state["step"], state["num_updates"]
    )


def _plain(value: Any) -> Any:
    """An option as it is saved: functions by name."""
    if callable(value):
        return _FUNCTION + getattr(value, "__name__", type(value).__name__)
    return value


def _merged(options: Options, saved: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for in the saved run, if it does not contradict the caller.

    Raises:
        ValueError: It does, or it was a function that the caller has to give again.
    """
    defaults = Options()
    found = {}
    for name, value in saved.items():
        own = getattr(options, name)
        if _plain(own) == value:
            continue
        is_function = isinstance(value, str) and value.startswith(_FUNCTION)
        if own != getattr(defaults, name):
            raise ValueError(
                f"state_dict was made with {name}={value!r}, but the pruner is asked "
                f"for {name}={_plain(own)!r}; leave it out or give the same"
            )
        # A distribution has done its work; a score has not.
        if is_function and name != "sparsity_distribution":
            raise ValueError(
                f"state_dict was made with {name}= a {value}, which it cannot hold; "
                f"give the same {name}= again"
            )
        if not is_function:
            found[name] = value
    return found


def _fit(
    saved: Mapping[str, Any], weights: Sequence[Weight], options: Options
) -> list[SparseLayer]:
    by_name = {weight.name: weight for weight in weights}
    missing = [name for name in saved if name not in by_name]
    if missing:
        raise ValueError(
            f"state_dict has masks of {missing}, which are no weights of this model "
            f"that can be sparse; there are {list(by_name)}. It must be the same "
            "model, with the same include= and exclude="
        )
    layers = []
    for weight in weights:
        if weight.name not in saved:
            continue
        entry = saved[weight.name]
        check_shape(weight, tuple(entry["shape"]))
        device = weight.parameter.device
        gradient = entry.get("gradient")
        layers.append(
            SparseLayer(
                weight,
                entry["sparsity"],
                entry["num_active"],
                like(weight.parameter, unpack(entry["mask"], entry["shape"])),
                _history(weight, entry),
                options.rows(weight, entry["sparsity"]),
                gradient=None if gradient is None else gradient.to(device, copy=True),
            )
        )
    return layers


def _history(weight: Weight, entry: Mapping[str, Any]) -> History:
    """Where connections have been; in older states, where they are."""
    mask = unpack(entry["mask"], entry["shape"])
    ever = unpack(entry.get("ever_active", entry["mask"]), entry["shape"])
    counts = int(mask.count_nonzero()), int(ever.count_nonzero())
    return History.resume(like(weight.parameter, ever), *counts)
