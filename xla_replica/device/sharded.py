"""Parameters of which a process holds a part, for code that needs whole ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from xla_replica.common.trees import NamedTensors, map_tensors, tensors_in


def is_sharded(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a DTensor, of which a process may hold a part.

    Args:
        tensor: Such as a parameter of a model that ``fully_shard`` was given.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """Returns what this process holds of a tensor, which may be empty."""
    with torch.no_grad():
        own: torch.Tensor = tensor.to_local().detach() if is_sharded(tensor) else tensor
    return own


@torch.no_grad()
def use_memory(tensors: list[Any], flat: torch.Tensor) -> None:
    """Makes a flat tensor the memory of what this process holds of DTensors."""
    for tensor, memory in zip(tensors, flat.split([local(t).numel() for t in tensors])):
        tensor.to_local().data = memory.view(tensor.to_local().shape)


def whole(tensor: Any) -> torch.Tensor:
    """Returns all numbers of a tensor, on every process that has a part. Collective."""
    full: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def parts_of(state: Any) -> tuple[Any, list[Any]]:
    """Returns a state with this process's parts in place of DTensors, and their shapes.

    The shapes are those of the whole tensors, in the order of `tensors_in`; None for
    each that is no DTensor.
    """
    shapes = [[*each.shape] if is_sharded(each) else None for each in tensors_in(state)]
    return map_tensors(state, local), shapes


def joined_parts(
    state: Any, shapes: Iterable[Any], like: Iterable[torch.Tensor]
) -> Any:
    """Returns the state of which `parts_of` has told, with this process's parts.

    A tensor is sharded as the one of its shape among ``like``, such as parameters.
    """
    models: dict[Any, Any] = {tuple(p.shape): p for p in like if is_sharded(p)}
    whole = iter(shapes)

    def joined(part: torch.Tensor) -> Any:
        shape = next(whole)
        if shape is None:
            return part
        model = models[tuple(shape)].detach()
        tensor: Any = torch.empty_like(model, dtype=part.dtype)
        tensor.to_local().copy_(part)
        return tensor

    return map_tensors(state, joined)


def sharding(tensors: Iterable[Any]) -> list[str]:
    """Returns in which ways tensors are sharded, as texts that members compare."""
    found = [t for t in tensors if is_sharded(t)]
    return sorted({f"{t.placements} on {tuple(t.device_mesh.shape)}" for t in found})


def refuse_sharded(parameters: NamedTensors, user: str, remedy: str) -> None:
    """Raises TypeError if any of these parameters is sharded.

    Args:
        parameters: By name.
        user: What needs whole ones.
        remedy: What to do, after "Keep the model whole on every process".
    """
    found = [name for name, each in parameters.items() if is_sharded(each)]
    if found:
        raise TypeError(
            f"{user}: {', '.join(map(repr, found[:3]))}"
            f"{f' and {len(found) - 3} more' if len(found) > 3 else ''} are DTensors, "
            "sharded as by FSDP2's fully_shard, and samples' gradients are those of "
            f"whole parameters. Keep the model whole on every process{remedy}"
        )
