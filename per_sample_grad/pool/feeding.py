"""How a batch of a pool becomes inputs and targets, and inputs become logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Split = Callable[[Any], tuple[Any, Any]]
Forward = Callable[[nn.Module, Any], torch.Tensor]

# Keys of targets in a dict, as Hugging Face's collators and data sets name them.
TARGETS = ("labels", "label")
_UNDERSTOOD = (
    "understood are a tensor (inputs alone), a pair (inputs, targets), and a dict with "
    f"the targets under one of the keys {', '.join(TARGETS)}; for anything else pass "
    "split=, a function from a batch to (inputs, targets or None)"
)


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The default ``split``: inputs, and targets or None.

    Args:
        batch: A tensor (inputs alone); ``(inputs,)`` or ``(inputs, targets)``, a tuple
            or a list; a dict, whose ``"labels"`` or ``"label"`` are the targets and
            whose other entries are the inputs.

    Raises:
        ValueError: A tuple of another length, or a dict with both keys or neither
            inputs.
        TypeError: Anything else.

    >>> split_batch({"input_ids": 1, "attention_mask": 2, "labels": 3})
    ({'input_ids': 1, 'attention_mask': 2}, 3)
    """
    if isinstance(batch, torch.Tensor):
        return batch, None
    if isinstance(batch, Mapping):
        found = [key for key in TARGETS if key in batch]
        inputs = {key: value for key, value in batch.items() if key not in found}
        if len(found) > 1 or not inputs:
            raise ValueError(
                f"a batch of the pool is a dict of {', '.join(map(repr, batch))}, of "
                "which what are inputs and what targets is not known; " + _UNDERSTOOD
            )
        return inputs, batch[found[0]] if found else None
    if isinstance(batch, tuple | list):
        if len(batch) not in (1, 2):
            raise ValueError(
                f"a batch of the pool has {len(batch)} items; {_UNDERSTOOD}"
            )
        return batch[0], batch[1] if len(batch) == 2 else None
    raise TypeError(f"a batch of the pool is a {type(batch).__name__}; {_UNDERSTOOD}")


def checked_split(split: Split, batch: Any) -> tuple[Any, Any]:
    """``split(batch)``, which must be a pair."""
    found = split(batch)
    if not isinstance(found, tuple) or len(found) != 2:
        size = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise TypeError(
            f"split= gave a {type(found).__name__}{size}; give a pair, "
            "(inputs, targets) or (inputs, None)"
        )
    return found


def call_model(model: nn.Module, inputs: Any) -> torch.Tensor:
    """The default ``forward``.

    ``model(tensor)``, ``model(**dict)`` or ``model(*tuple)``; what comes back is logits
    or has them as ``.logits`` or ``["logits"]``.
    """
    if isinstance(inputs, torch.Tensor):
        out = model(inputs)
    elif isinstance(inputs, Mapping):
        out = model(**inputs)
    elif isinstance(inputs, tuple | list):
        out = model(*inputs)
    else:
        raise TypeError(
            f"the inputs are a {type(inputs).__name__}; a tensor, a dict of keyword "
            "arguments or a tuple of arguments can be given to the model; for "
            "anything else pass forward=, a function of model and inputs to logits"
        )
    if isinstance(out, Mapping) and "logits" in out:
        return out["logits"]
    return getattr(out, "logits", out)


def checked_forward(forward: Forward, model: nn.Module, inputs: Any) -> torch.Tensor:
    """``forward(model, inputs)``, which must be a tensor."""
    logits = forward(model, inputs)
    if not isinstance(logits, torch.Tensor):
        raise TypeError(
            f"the model gave a {type(logits).__name__} without .logits, not a tensor "
            "of logits; pass forward=, a function of model and inputs to logits"
        )
    return logits
