"""Checkpoints of a training run: one file, whole or not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from xla_replica import Replica


def fetched(state: Any, replica: Replica) -> Any:
    """``state`` with every tensor in it on the CPU: one transfer for all of them."""
    tensors: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, Mapping):
            for part in value.values():
                collect(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                collect(part)

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(on_cpu)
        if isinstance(value, Mapping):
            return {key: replaced(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(replaced(part) for part in value)
        return value

    collect(state)
    on_cpu = iter(replica.fetch(tensors))
    return replaced(state)


def write(state: dict[str, Any], path: Path) -> None:
    """Writes ``path``; a crash leaves the file that was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `write` wrote.

    Raises:
        ValueError: It is a run with other settings; all differences are listed.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    saved = state["settings"]
    differences = [
        f"{name} was {saved.get(name)!r} and is {settings.get(name)!r}"
        for name in sorted(saved.keys() | settings.keys())
        if saved.get(name) != settings.get(name)
    ]
    if differences:
        raise ValueError(f"{path} is another run: {'; '.join(differences)}")
    return state
