"""One call of a module in the recorded forward pass, as a layer rule sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from per_sample_grad.errors import Refusal


@dataclasses.dataclass(frozen=True)
class Call:
    """A module and what it was called with.

    Attributes:
        module: The module.
        args: Positional arguments; tensors detached.
        kwargs: Keyword arguments; tensors detached.
        batch_dim: The dimension of the tensors that counts samples.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_dim: int

    @property
    def input(self) -> torch.Tensor:
        """The first argument, with the batch as its first dimension."""
        value = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        if not isinstance(value, torch.Tensor):
            raise Refusal(f"its first argument is a {type(value).__name__}, no tensor")
        return self.batch_first(value)

    def batch_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with the batch as its first dimension."""
        if not -tensor.dim() <= self.batch_dim < tensor.dim():
            raise Refusal(
                f"a tensor of shape {tuple(tensor.shape)} has no dimension "
                f"{self.batch_dim} to count samples"
            )
        return tensor.movedim(self.batch_dim, 0)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def detached(value: Any) -> Any:
    """``value`` with every tensor in it outside the graph; no copies."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list):
        return [detached(item) for item in value]
    if isinstance(value, tuple):
        items = [detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    return value
