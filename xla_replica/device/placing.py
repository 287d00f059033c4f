"""Moving a model to a device as the one that it is."""

from __future__ import annotations

import torch
from torch import nn


def move_with_ties(model: nn.Module, device: torch.device) -> None:
    """Moves a model, in which what is tied stays tied.

    On XLA ``model.to`` gives every place where a parameter or buffer is used a tensor
    of its own.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                places.setdefault(id(tensor), []).append((module, name))
    model.to(device)
    for (first, name), *others in places.values():
        for module, other in others:
            setattr(module, other, getattr(first, name))
