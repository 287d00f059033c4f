"""A sparse model in a file: the values of kept weights, and one bit per weight.

In the zip file of `torch.save` are one flat tensor for each dtype, one of all bits, and
a table of names, dtypes and shapes. So its size is what `size_in_bytes` says of weights
and biases, plus the other parameters and buffers, plus the table (about 100 bytes for a
tensor, and 2 kB).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import xla_replica
from rigl_xla.layers.checks import pruner_of
from rigl_xla.layers.sparse_layer import to_host
from rigl_xla.layers.weights import check_model
from rigl_xla.topology.masks import pack, unpack
from xla_replica.common.arguments import check_type
from xla_replica.common.differences import check_same
from xla_replica.common.files import unfinished_name, write_whole
from xla_replica.common.names import unwrapped

FORMAT = "rigl_xla compact 1"


def save_compact(
    path: str | Path, model: nn.Module, masks: Mapping[str, torch.Tensor]
) -> Path:
    """Writes parameters and buffers of a sparse model, without its inactive weights.

    `load_compact` reads it. The file is whole or not there. Reads the device, in one
    transfer; where there are several replicas, call it on one.

    Args:
        path: The file, which is replaced if it exists.
        model: The model, with or without wrappers such as DDP, which are not stored.
        masks: `RigLScheduler.masks`; bool by parameter name, True where active.

    Returns:
        The path.

    Raises:
        ValueError: A mask fits no parameter, or a weight outside of its mask is not
            zero, as in an average over several topologies.
        TypeError: The model's state has something that is not a tensor, or an argument
            is of another type.
    """
    path = Path(path)
    tensors, shared = _tensors(model)
    _check_masks(masks, tensors)
    host = to_host([*tensors.values(), *masks.values()], xla_replica.current())
    bits = dict(zip(masks, host[len(tensors) :]))
    table: dict[str, list[Any]] = {}  # dtype, shape, and the count of a mask, if any
    values: dict[str, list[torch.Tensor]] = {}
    for name, value in zip(tensors, host):
        table[name] = [*_kind(value), None]
        if name in bits:
            mask = bits[name]
            num_outside = int(value[~mask].count_nonzero())
            if num_outside:
                raise ValueError(
                    f"{num_outside} weights of {name!r} that its mask has as inactive "
                    "are not zero and would be lost. An average of weights over "
                    "several topologies is not sparse: average after T_end only, or "
                    "multiply the average by the masks first"
                )
            value, table[name][2] = value[mask], int(mask.sum())
        values.setdefault(table[name][0], []).append(value.flatten())
    flat = [bits[name].flatten() for name in table if name in bits]
    content = {
        "format": FORMAT,
        "tensors": table,
        "shared": shared,
        "values": {dtype: torch.cat(parts) for dtype, parts in values.items()},
        "masks": pack(torch.cat(flat)) if flat else torch.empty(0).byte(),
    }
    content["checksum"] = _checksum(content)
    unfinished = unfinished_name(path)
    return write_whole(unfinished, lambda file: torch.save(content, file), path)


def load_compact(path: str | Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Fills a model with what `save_compact` wrote of one that was built like it.

    The file is read with torch's safe defaults. Whatever does not fit is an error, and
    nothing has changed then.

    Args:
        path: The file.
        model: The model to fill, on any device.

    Returns:
        The masks by parameter name, on the CPU.

    Raises:
        ValueError: It is not such a file, is damaged, is of another model, or a
            `RigLScheduler` keeps the model sparse by its own masks.
        TypeError: ``model`` is not a module.
    """
    content = _read(Path(path))
    tensors, shared = _tensors(model)
    table = content["tensors"]
    saved = {name: (dtype, shape) for name, (dtype, shape, _) in table.items()}
    own = {name: _kind(value) for name, value in tensors.items()}
    what = f"{path}: the model of this file and the given one differ"
    remedy = "Build the model as it was, with the same dtypes; convert it afterwards"
    check_same({**saved, **content["shared"]}, {**own, **shared}, what, remedy)
    held = [name for name in table if pruner_of(tensors[name]) is not None]
    if held:
        raise ValueError(
            f"{held[0]!r} is kept sparse by a RigLScheduler, whose masks are others "
            "than the file's: close() that first. To continue a run, load the states "
            "of model, optimizer and pruner"
        )
    masked = [name for name, entry in table.items() if entry[2] is not None]
    sizes = [math.prod(table[name][1]) for name in masked]
    bits = unpack(content["masks"], [sum(sizes)]).split(sizes)
    masks = {name: part.reshape(table[name][1]) for name, part in zip(masked, bits)}
    begins = dict.fromkeys(content["values"], 0)
    with torch.no_grad():
        for name, (dtype, shape, num_active) in table.items():
            size = math.prod(shape) if num_active is None else num_active
            value = content["values"][dtype].narrow(0, begins[dtype], size)
            begins[dtype] += size
            if num_active is not None:
                value = value.new_zeros(shape).masked_scatter_(masks[name], value)
            tensors[name].copy_(value.reshape(shape))
    return masks


def _tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns a model's state by first name, and those by further names of shared ones.

    Names are without what wrappers put into them.
    """
    check_model(model)
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = unwrapped(key)
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"the model's state has {name!r}, a {type(value).__name__}; a compact "
                "file holds tensors only. Save torch's state_dict() instead"
            )
        if value.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device, which holds no values; move the "
                "model first, by to_empty(device=...)"
            )
        if first.setdefault(id(value), name) == name:
            tensors[name] = value
        else:
            shared[name] = first[id(value)]
    return tensors, shared


def _check_masks(
    masks: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raises ValueError or TypeError unless every mask fits a tensor of the model."""
    check_type("masks", masks, Mapping, "a dict of bool tensors by parameter name")
    for name, mask in masks.items():
        if name not in tensors:
            raise ValueError(
                f"masks has {name!r}, which is not in the model's state; there are "
                f"{list(tensors)}"
            )
        check_type(f"the mask of {name!r}", mask, torch.Tensor, "a bool tensor")
        shape = tensors[name].shape
        if mask.dtype != torch.bool or mask.shape != shape:
            raise ValueError(
                f"the mask of {name!r} must be bool of shape {tuple(shape)}, got "
                f"{mask.dtype} of shape {tuple(mask.shape)}"
            )


def _kind(tensor: torch.Tensor) -> tuple[str, list[int]]:
    """Returns the name of a tensor's dtype, and its shape."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _read(path: Path) -> Any:
    """Returns the content of a file whose checksum is right."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of any type, as the bytes of another file have it
        raise ValueError(f"{path} is damaged, or not a compact file") from error
    kind = content.get("format") if isinstance(content, dict) else type(content)
    if kind != FORMAT:
        raise ValueError(
            f"{path} has format {kind!r}; this release reads {FORMAT!r}, as "
            "rigl_xla.save_compact writes it"
        )
    if content.pop("checksum", None) != _checksum(content):
        raise ValueError(f"{path} is damaged: its checksum is not that of its content")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    """Returns a hash of everything in a file, in its order."""
    digest = hashlib.blake2b(digest_size=16)
    words = [content[name] for name in ("format", "tensors", "shared")]
    digest.update(repr(words).encode())
    for dtype, flat in [*content["values"].items(), ("masks", content["masks"])]:
        digest.update(f"{dtype} {len(flat)}".encode())
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()
