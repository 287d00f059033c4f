"""Sharded tensors of a checkpoint, beside its file.

Every replica writes what it holds of them into one folder, in the format of PyTorch's
distributed checkpoints (DCP). In the checkpoint's file a tensor without content stands
for each, and the name of the folder and the SHA-256 of what is in it follow. The file
is written last, so that a checkpoint is whole or not there.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from xla_replica import Replica
from xla_replica.common.trees import map_tensors, named_tensors

SUFFIX = ".shards"
State = dict[str, Any]


def split(name: Path, state: State, replica: Replica) -> tuple[State, dict[str, str]]:
    """Returns the state without its sharded tensors, which it writes. Collective.

    Args:
        name: How the path of the checkpoint begins.
        state: Of any tensors.
        replica: The replica.

    Returns:
        The state, and the SHA-256 of every file that was written, by name.

    Raises:
        TypeError: A tensor has no content.
        OSError: Writing failed on one of the replicas; on all of them.
    """
    tensors = _named(state)
    if hollow := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise TypeError(
            f"the tensor {hollow[0]!r} of the state is on the device 'meta' and has no "
            "content: give it some with to_empty() or load_state_dict()"
        )
    sharded = {n: t for n, t in tensors.items() if replica.is_sharded([t])}
    if not sharded:
        return state, {}
    token = replica.all_gather_object(secrets.token_hex(8))[0]
    folder = name.with_name(f"{name.name}-{token}{SUFFIX}")

    def without_content(tensor: torch.Tensor) -> torch.Tensor:
        if not replica.is_sharded([tensor]):
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    state = map_tensors(state, without_content) | {"shards": folder.name}
    return state, replica.write_shards(folder, sharded)


def fill(
    folder: Path, state: State, replica: Replica, parameters: Sequence[torch.Tensor]
) -> State:
    """Returns a saved state with its sharded tensors. Collective.

    Args:
        folder: The folder of the checkpoint.
        state: What was in the checkpoint's file, or a part of it under the same keys.
        replica: The replica.
        parameters: Those of the model; states are sharded as they are.

    Raises OSError if a file cannot be read.
    """
    if "shards" not in state:
        return state
    wanted = {name: tensor for name, tensor in _named(state).items() if tensor.is_meta}
    read = replica.read_shards(folder / state["shards"], wanted, parameters)
    found = iter(read.values())
    return map_tensors(state, lambda t: next(found) if t.is_meta else t)


def _named(state: State) -> dict[str, torch.Tensor]:
    """Returns all tensors by name: parts by their own, as in their state."""
    return {name.removeprefix("parts."): t for name, t in named_tensors(state)}
