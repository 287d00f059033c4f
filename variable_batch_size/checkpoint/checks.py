"""Whether a `Checkpointer` can save what it is given, and resume what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from variable_batch_size.optimizer import ElasticOptimizer


def check_parts(optimizer: Any, parts: Mapping[str, Any]) -> None:
    """Raises unless a checkpoint of these would hold all that is trained, once.

    Raises:
        TypeError: ``optimizer`` is not an elastic wrapper, or a part has no state.
        ValueError: A part is saved with the wrapper, or a parameter in no part.
    """
    if not isinstance(optimizer, ElasticOptimizer):
        raise TypeError(
            f"Checkpointer: optimizer must be an elastic wrapper, got {optimizer!r}"
        )
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(
                f"Checkpointer: {name}={part!r} has no state_dict and load_state_dict"
            )
        if part is optimizer.inner or part is optimizer.sampler:
            raise ValueError(
                f"Checkpointer: {name} is already saved with the wrapper's state: "
                "leave it out"
            )
    saved = {
        id(parameter)
        for part in parts.values()
        if isinstance(part, nn.Module)
        for parameter in part.parameters()
    }
    groups = optimizer.param_groups
    missing = sum(id(p) not in saved for group in groups for p in group["params"])
    if missing:
        raise ValueError(
            f"Checkpointer: {missing} of the optimizer's parameters are in no part "
            "that is a module, and would not be saved: pass model=model"
        )


def check_folder(folder: str | Path) -> None:
    """Raises ValueError if ``folder`` is the address of a bucket."""
    if "://" in str(folder):
        raise ValueError(
            f"folder={str(folder)!r} is not a path: mount the bucket (gcsfuse, s3fs) "
            "and pass the path of the mount"
        )


def check_plain(name: str, value: Any) -> None:
    """Raises TypeError unless an equal value can be read from a file again.

    Args:
        name: What errors call the value.
        value: Texts, numbers, None, and lists and dicts of these.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_plain(f"{name}[{key!r}]", part)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            check_plain(f"{name}[{index}]", part)
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; settings may be texts, "
            "numbers, None, and lists and dicts of these"
        )


def check_version(state: Any, version: int, path: Path) -> None:
    """Raises ValueError unless a checkpoint has the format ``version``."""
    found = state.get("version") if isinstance(state, dict) else None
    if found != version:
        raise ValueError(
            f"{path} has version {found!r}; this version of the library reads {version}"
        )
