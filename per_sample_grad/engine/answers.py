"""Adding answers that were given for some parameters at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

_T = TypeVar("_T")


def added(first: _T, second: _T) -> _T:
    """The sum of two answers of one form.

    Args:
        first: A tensor, or tuples, lists and dicts of such.
        second: The like; dicts may have other names, which are joined.

    >>> added({"a": torch.ones(2)}, {"b": torch.zeros(1)})
    {'a': tensor([1., 1.]), 'b': tensor([0.])}
    """
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first + second
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        both = {
            name: added(first[name], second[name]) for name in first if name in second
        }
        return {**first, **second, **both}  # type: ignore[return-value]
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        items = [added(a, b) for a, b in zip(first, second, strict=True)]
        kind = type(first)
        return kind(*items) if hasattr(first, "_fields") else kind(items)
    raise TypeError(
        f"stream: the answer gave a {type(first).__name__} and a "
        f"{type(second).__name__}; it has to give tensors, or tuples, lists and dicts "
        "of such, the same for all parameters"
    )
