"""What is saved of a pruner's state, and how that is read back."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from rigl_xla.contrib import rigl_torch
from rigl_xla.layers.options import Options
from rigl_xla.layers.sparse_layer import SparseLayer
from rigl_xla.layers.weights import Weight, weights_of
from rigl_xla.topology.masks import pack, unpack
from rigl_xla.topology.update_schedule import UpdateSchedule
from rigl_xla.update.steps import TopologySteps
from xla_replica import Replica
from xla_replica.common.arguments import (
    check_integer,
    check_names,
    check_number,
    check_type,
)
from xla_replica.common.differences import check_same, differences

FORMAT = 3
# No state holds these options. Others may be repeated by the caller, who gets them from
# the state otherwise.
_NOT_SAVED = ("initial_masks", "initial_weights", "include", "exclude")
_SCHEDULE = [field.name for field in dataclasses.fields(UpdateSchedule)]
_WHOLE, _KEYS = "state_dict must be what RigLScheduler gave, whole, with", "its keys"
_PARTS = ("step", "num_updates", "options", "layers", "dense")
_FUNCTION = "function "  # begins the name of a function, which a state cannot hold


def to_dict(now: TopologySteps, replica: Replica) -> dict[str, Any]:
    """Returns `RigLScheduler.state_dict`. Reads the device, in one transfer."""
    layers: dict[str, Any] = {}
    for layer in now.layers:
        layers[layer.name] = {"mask": layer.mask, "ever_active": layer.ever}
        if now.is_collecting and layer.gradient is not None:
            layers[layer.name]["gradient"] = layer.gradient
    layers = replica.to_host(layers)
    for layer in now.layers:
        entry = layers[layer.name]
        # Not layer.num_active: gradual pruning may have refused an update.
        entry["num_active"] = int(entry["mask"].sum())
        entry |= {name: pack(entry[name]) for name in ("mask", "ever_active")}
        entry |= {"shape": list(layer.mask.shape), "sparsity": layer.sparsity}
    return {
        "format": FORMAT,
        "step": now.number,
        "num_updates": now.num_updates,
        "options": _plain(now.options),
        "layers": layers,
        "dense": [w.name for w in now.weights if w.name not in layers],
    }


def from_dict(
    state: Mapping[str, Any], pruner: Any, changes: Mapping[str, Any], stacklevel: int
) -> TopologySteps:
    """Fits a saved state to a pruner; see `RigLScheduler.load_state_dict`."""
    model, options = pruner.model, pruner.options
    check_type("state_dict", state, Mapping, "what a pruner's state_dict() gave")
    if "backward_masks" in state:
        state = {"format": FORMAT, **rigl_torch.converted(state, model)}
    if state.get("format") != FORMAT:
        raise ValueError(
            f"state_dict has format {state.get('format')!r} and keys {sorted(state)}; "
            f"this release reads its own format {FORMAT} and rigl-torch 0.5.2's states"
        )
    check_names(_WHOLE, _PARTS, state, _KEYS)
    for part in ("options", "layers"):
        check_type(f"state_dict[{part!r}]", state[part], Mapping, "a dict")
    resumed = _resumed(options, state["options"], changes, stacklevel + 1)
    if resumed.from_rigl_torch:
        weights = rigl_torch.weights_of(model)
    else:
        weights = weights_of(model, options.include, options.exclude)
    saved, own = state["layers"], [weight.name for weight in weights]
    known = [*saved, *state["dense"]]
    by = "by the same include=, exclude= and frozen weights"
    check_names("state_dict has", known, own, f"weights that can be sparse {by}")
    check_names("the model has", own, known, f"weights of state_dict {by}")
    return TopologySteps(
        weights,
        [_layer_of(saved[w.name], w, resumed) for w in weights if w.name in saved],
        resumed,
        check_integer("the step in state_dict", state["step"], 0),
        check_integer("num_updates in state_dict", state["num_updates"], 0),
    )


def _plain(options: Options) -> dict[str, Any]:
    """Returns the options that are saved, functions by name."""
    saved = {n: value for n, value in vars(options).items() if n not in _NOT_SAVED}
    for name, value in saved.items():
        if callable(value):
            saved[name] = _FUNCTION + getattr(value, "__name__", type(value).__name__)
    return saved


def _resumed(
    options: Options, saved: Mapping[str, Any], changes: Mapping[str, Any], level: int
) -> Options:
    """Returns the saved options, and warns if the caller's schedule is another one.

    Raises ValueError if the caller asks for another option than the saved one.
    """
    own, defaults = _plain(options), _plain(Options())
    check_names("state_dict['options'] has", saved, own, "the options of this release")
    if unknown := [name for name in changes if name not in _SCHEDULE]:
        raise TypeError(f"load_state_dict: unexpected keyword argument {unknown[0]!r}")
    asked = {name: name for name in saved if own[name] != defaults[name]}
    of_run = {name: name for name in asked if name not in _SCHEDULE}
    what = "load_state_dict: the state of a run with other options"
    check_same(saved, own, what, "Leave them out or give the same", of_run)
    values = {}
    for name, value in saved.items():
        if not (isinstance(value, str) and value.startswith(_FUNCTION)):
            values[name] = value
        # A distribution has done its work; a score has not.
        elif own[name] != value and name != "sparsity_distribution":
            raise ValueError(
                f"state_dict was made with {name}= a {value}; give the same one again"
            )
    resumed = dataclasses.replace(options, **{**values, **changes})
    of_schedule = {n: n for n in asked if n in _SCHEDULE and n not in changes}
    if changed := differences(saved, own, of_schedule):
        again = ", ".join(f"{n}={own[n]!r}" for n in of_schedule if own[n] != saved[n])
        warnings.warn(
            f"the saved schedule goes on: {'; '.join(changed)} in this call, which has "
            f"no effect. For another one say pruner.load_state_dict(state, {again}); "
            "where a Checkpointer has loaded the run, state=pruner.state_dict()",
            stacklevel=level,
        )
    return resumed


def _layer_of(
    entry: Mapping[str, Any], weight: Weight, options: Options
) -> SparseLayer:
    """Returns a layer of a saved state; raises ValueError if it does not fit."""
    weight.check_kind()
    name, shape = weight.name, tuple(weight.parameter.shape)
    parts = ("shape", "sparsity", "mask", "ever_active")
    check_names(_WHOLE, parts, entry, f"{_KEYS} for {name!r}")
    gradient = entry.get("gradient")
    of_gradient = shape if gradient is None else gradient.shape
    for what, other in {"mask": entry["shape"], "gradient": of_gradient}.items():
        if tuple(other) != shape:
            raise ValueError(
                f"state_dict has a {what} of shape {tuple(other)} for {name!r}, which "
                f"has shape {shape}; it is of another model"
            )
    what = f"the sparsity of {name!r} in state_dict"
    sparsity = check_number(what, entry["sparsity"], 0, below=1)
    mask, ever = (unpack(entry[which], shape) for which in ("mask", "ever_active"))
    active, pattern = int(mask.count_nonzero()), options.pattern(weight, sparsity)
    layer = SparseLayer(weight, sparsity, active, mask, pattern, ever)
    if gradient is not None:
        layer.gradient = gradient.to(layer.mask.device, copy=True)
    return layer
