"""Parameters of which a process holds a part, for code that needs whole ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a DTensor, of which a process may hold a part.

    Args:
        tensor: Such as a parameter of a model that ``fully_shard`` was given.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_sharded(
    parameters: Mapping[str, torch.Tensor], user: str, remedy: str
) -> None:
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
