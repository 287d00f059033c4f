"""What is saved of a pruner's state, and how that is read back."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rigl_xla.contrib import rigl_torch
from rigl_xla.layers.checks import check_kind
from rigl_xla.layers.options import NOT_SAVED, Options
from rigl_xla.layers.sparse_layer import SparseLayer, to_host
from rigl_xla.layers.weights import Weight, weights_of
from rigl_xla.topology.distribution import as_float
from rigl_xla.topology.masks import pack, unpack
from rigl_xla.topology.update_schedule import UpdateSchedule
from rigl_xla.update.steps import TopologySteps
from xla_replica import Replica
from xla_replica.common.arguments import check_integer, check_number, check_type
from xla_replica.common.differences import check_same, differences

FORMAT = 2
_FUNCTION = "function "  # begins the name of a function, which a state cannot hold


def to_dict(now: TopologySteps, replica: Replica) -> dict[str, Any]:
    """Returns `RigLScheduler.state_dict`. Reads the device, in one transfer."""
    collected = [x for x in now.layers if now.is_collecting and x.gradient is not None]
    tensors = [mask for layer in now.layers for mask in (layer.mask, layer.ever)]
    tensors += [layer.gradient.detach() for layer in collected]
    host = iter(to_host(tensors, replica))
    layers: dict[str, Any] = {}
    for layer in now.layers:
        mask, ever = next(host), next(host)
        layers[layer.name] = {
            "shape": list(mask.shape),
            "sparsity": layer.sparsity,
            # Not layer.num_active: gradual pruning may have refused an update.
            "num_active": int(mask.sum()),
            "mask": pack(mask),
            "ever_active": pack(ever),
        }
    for layer in collected:
        layers[layer.name]["gradient"] = next(host)
    return {
        "format": FORMAT,
        "step": now.number,
        "num_updates": now.num_updates,
        "schedule": dataclasses.asdict(now.schedule),
        "options": _plain_options(now.options),
        "layers": layers,
        "dense": [w.name for w in now.weights if w.name not in layers],
    }


def from_dict(
    state: Mapping[str, Any],
    model: nn.Module,
    options: Options,
    schedule: UpdateSchedule,
    changes: Mapping[str, Any],
    stacklevel: int,
) -> TopologySteps:
    """Fits a saved state to a model; see `RigLScheduler.load_state_dict`."""
    allowed = "what RigLScheduler.state_dict() gave, or rigl-torch 0.5.2's"
    check_type("state_dict", state, Mapping, allowed)
    if "backward_masks" in state:
        state = {"format": FORMAT, **rigl_torch.converted(state, model)}
    if state.get("format") != FORMAT:
        raise ValueError(
            f"state_dict has format {state.get('format')!r} and keys {sorted(state)}; "
            f"this release reads its own format {FORMAT} and rigl-torch 0.5.2's states"
        )
    _check_parts(state)
    options = _resumed(options, state["options"])
    values = {**dataclasses.asdict(schedule), **state["schedule"], **changes}
    if options.from_rigl_torch:
        weights = rigl_torch.weights_of(model)
    else:
        weights = weights_of(model, options.include, options.exclude)
    steps = TopologySteps(
        weights,
        _fit(state["layers"], state["dense"], weights, options),
        options,
        UpdateSchedule(**values),
        check_integer("the step in state_dict", state["step"], 0),
        check_integer("num_updates in state_dict", state["num_updates"], 0),
    )
    _warn_of_schedule(schedule, state["schedule"], changes, stacklevel)
    return steps


def _check_parts(state: Mapping[str, Any]) -> None:
    """Raises ValueError if a state lacks something, or has what nobody reads."""
    _check_has(state, ("step", "num_updates", "schedule", "options", "layers", "dense"))
    check_type("state_dict['layers']", state["layers"], Mapping, "a dict")
    for part, kind in {"options": Options, "schedule": UpdateSchedule}.items():
        what = f"state_dict[{part!r}]"
        given = check_type(what, state[part], Mapping, "a dict")
        known = {field.name for field in dataclasses.fields(kind)}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"{what} has {unknown}, which this release does not know")


def _check_has(part: Mapping[str, Any], names: Sequence[str], of: str = "") -> None:
    """Raises ValueError if a part of a state lacks any of the names."""
    missing = [name for name in names if name not in part]
    if missing:
        raise ValueError(
            f"state_dict lacks {missing}{of}; it must be what RigLScheduler gave, whole"
        )


def _warn_of_schedule(
    own: UpdateSchedule,
    saved: Mapping[str, Any],
    changes: Mapping[str, Any],
    stacklevel: int,
) -> None:
    """Warns if a schedule that the caller asked for is not the saved one."""
    default = dataclasses.asdict(UpdateSchedule())
    asked = {
        name: value
        for name, value in dataclasses.asdict(own).items()
        if value != default[name] and name in saved and name not in changes
    }
    if changed := differences(saved, asked, {name: name for name in asked}):
        names = ", ".join(f"{n}={v!r}" for n, v in asked.items() if saved[n] != v)
        warnings.warn(
            f"the saved schedule goes on: {'; '.join(changed)} in this call, which has "
            f"no effect. For another one say pruner.load_state_dict(state, {names}); "
            "where a Checkpointer has loaded the run, state=pruner.state_dict()",
            stacklevel=stacklevel + 1,
        )


def _plain_options(options: Options) -> dict[str, Any]:
    """Returns the options that are saved, functions by name."""
    saved = {}
    for field in dataclasses.fields(options):
        if field.name not in NOT_SAVED:
            value = getattr(options, field.name)
            if callable(value):
                value = _FUNCTION + getattr(value, "__name__", type(value).__name__)
            elif isinstance(value, Mapping):
                value = {name: as_float(number) for name, number in value.items()}
            saved[field.name] = value
    return saved


def _resumed(options: Options, saved: Mapping[str, Any]) -> Options:
    """Returns the caller's options with the saved ones, which may be repeated."""
    own, defaults = _plain_options(options), _plain_options(Options())
    chosen = {name: name for name in saved if own[name] != defaults[name]}
    what = "load_state_dict: the state of a run with other options"
    check_same(saved, own, what, "Leave them out or give the same", chosen)
    values = {}
    for name, value in saved.items():
        if not (isinstance(value, str) and value.startswith(_FUNCTION)):
            values[name] = value
        # A distribution has done its work; a score has not.
        elif own[name] != value and name != "sparsity_distribution":
            raise ValueError(
                f"state_dict was made with {name}= a {value}; give the same one again"
            )
    return dataclasses.replace(options, **values)


def _fit(
    saved: Mapping[str, Any],
    dense: Sequence[str],
    weights: Sequence[Weight],
    options: Options,
) -> list[SparseLayer]:
    """Returns the layers of a saved state, in the order of the model's weights.

    ``dense`` are names of the other weights.
    """
    own, known = [weight.name for weight in weights], [*saved, *dense]
    missing = [name for name in known if name not in own]
    more = [name for name in own if name not in known]
    if missing or more:
        raise ValueError(
            f"state_dict has {missing}, which are not weights of this model that can "
            f"be sparse, and lacks {more}, which are, of {own}; it must be the same "
            "model, with the same include=, exclude= and frozen weights"
        )
    return [
        _layer_of(saved[weight.name], weight, options)
        for weight in weights
        if weight.name in saved
    ]


def _layer_of(
    entry: Mapping[str, Any], weight: Weight, options: Options
) -> SparseLayer:
    """Returns a layer of a saved state; raises ValueError if it does not fit."""
    check_kind(weight)
    parts = ("shape", "sparsity", "mask", "ever_active")
    _check_has(entry, parts, f" of {weight.name!r}")
    what = f"the sparsity of {weight.name!r} in state_dict"
    sparsity = check_number(what, entry["sparsity"], 0, below=1)
    shape = tuple(entry["shape"])
    if tuple(weight.parameter.shape) != shape:
        raise ValueError(
            f"state_dict has a mask of shape {shape} for {weight.name!r}, which has "
            f"shape {tuple(weight.parameter.shape)}; it is of another model"
        )
    mask = unpack(entry["mask"], shape)
    ever = unpack(entry["ever_active"], shape)
    pattern = options.pattern(weight, sparsity)
    active = int(mask.count_nonzero())
    layer = SparseLayer(weight, sparsity, active, mask, pattern, ever)
    gradient = entry.get("gradient")
    if gradient is not None:
        if tuple(gradient.shape) != shape:
            raise ValueError(
                f"state_dict has a gradient of shape {tuple(gradient.shape)} for "
                f"{weight.name!r} of shape {shape}; it is damaged"
            )
        layer.gradient = gradient.to(layer.mask.device, copy=True)
    return layer
