"""Tensors wherever they sit: in tuples, lists and dicts of any depth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``function`` of every tensor in it; the rest stays as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        # Of its own kind and with its attributes: state_dict()._metadata, Counter.
        changed = copy.copy(value)
        for key, part in value.items():
            changed[key] = map_tensors(part, function)
        return changed
    if isinstance(value, Mapping):
        return {key: map_tensors(part, function) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, function) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(part, function) for part in value)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that `map_tensors` calls its function with, in that order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found
