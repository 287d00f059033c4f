"""Tensors in nested tuples, lists and dicts of any depth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

Tensors = Sequence[torch.Tensor]
NamedTensors = Mapping[str, torch.Tensor]


def map_tensors(
    value: Any, function: Callable[[Any], Any], kind: type = torch.Tensor
) -> Any:
    """Returns ``value`` with ``function`` applied to every tensor in it.

    Or to everything of another ``kind``. Containers keep their types, also named
    tuples, and dicts keep their attributes. Everything else is returned as it is.
    """
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (list, tuple)):
        found = [map_tensors(part, function, kind) for part in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if not isinstance(value, Mapping):
        return value
    parts = {key: map_tensors(part, function, kind) for key, part in value.items()}
    if type(value) is dict or not isinstance(value, dict):
        return parts  # a copy of a plain dict could not be compiled
    changed = copy.copy(value)  # with its attributes, such as state_dict()._metadata
    for key, part in parts.items():
        changed[key] = part
    return changed


def without_numpy(value: Any) -> Any:
    """Returns ``value`` with Python's numbers in place of NumPy's.

    >>> without_numpy({"lr": np.float64(0.1), "betas": (np.float32(0.5), 0.9)})
    {'lr': 0.1, 'betas': (0.5, 0.9)}
    """
    return map_tensors(value, lambda number: number.item(), np.generic)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that `map_tensors` calls its function with, in that order."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def copy_parts_(tensors: Tensors, flat: torch.Tensor) -> None:
    """Copies into tensors what a flat one holds, one after another."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts):
        tensor.copy_(part.view_as(tensor))


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what `tensors_in` returns, each with the keys and places that lead to it.

    >>> [name for name, _ in named_tensors({"a": [torch.ones(1), torch.ones(1)]})]
    ['a.0', 'a.1']
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_tensors(part, f"{name}.{key}" if name else str(key))


def tree_add(first: Any, second: Any) -> Any:
    """Returns the sum of two values of one form: tensors, or containers of tensors.

    Tensors are added where they correspond: by position in tuples and lists, by key in
    dicts. A key that only one dict has keeps its value.

    >>> tree_add({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.zeros(1)})
    {'a': tensor([2., 2.]), 'b': tensor([0.])}
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        both = {k: tree_add(first[k], second[k]) for k in first if k in second}
        return {**first, **second, **both}
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        items = [tree_add(a, b) for a, b in zip(first, second, strict=True)]
        kind = type(first)
        return kind(*items) if hasattr(first, "_fields") else kind(items)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first + second
    raise TypeError(
        f"a {type(first).__name__} and a {type(second).__name__} cannot be added; give "
        "tensors, or tuples, lists and dicts of tensors, in the same form every time"
    )
