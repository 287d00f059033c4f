"""Whether a `Checkpointer` can save what it is given, and go on with what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from variable_batch_size.optimizer import ElasticOptimizer
from xla_replica.common.differences import differences


class Standing(NamedTuple):
    """What a `Checkpointer` has been told of, and where the sampler stands."""

    num_updates: int
    epoch: int
    step: int


def check_told(begun: Standing, now: Standing) -> None:
    """Raises ValueError if there have been updates that nobody told of."""
    # A place behind a step is that of an update; other places may be chosen freely.
    has_moved = now.step > 0 and now[1:] != begun[1:]
    if has_moved and now.num_updates == begun.num_updates:
        raise ValueError(
            "save: the optimizer has made updates that this Checkpointer knows nothing "
            "of: call optimizer.attach(checkpointer) before training. Without it, "
            "nothing is saved in between and no signal stops the run"
        )


def check_arguments(
    optimizer: Any,
    keep: int,
    best: str | None,
    look_every: int,
    parts: Mapping[str, Any],
) -> None:
    """Raises TypeError or ValueError unless `Checkpointer` can take them."""
    if not isinstance(optimizer, ElasticOptimizer):
        raise TypeError(
            f"Checkpointer: optimizer must be an elastic wrapper, got {optimizer!r}"
        )
    for name, value in (("keep", keep), ("look_every", look_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if best not in (None, "max", "min"):
        raise ValueError(f"best={best!r}; allowed are 'max', 'min' and None")
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(
                f"Checkpointer: {name}={part!r} has no state_dict and load_state_dict"
            )
        if part is optimizer.inner or part is optimizer.sampler:
            raise ValueError(
                f"Checkpointer: {name} is saved with the wrapper's state already: "
                "leave it out"
            )
    _check_parameters(optimizer, parts)


def check_folder(folder: str | Path) -> None:
    """Raises ValueError for the address of a bucket."""
    if "://" in str(folder):
        raise ValueError(
            f"folder={str(folder)!r} is no path: mount the bucket (gcsfuse, s3fs) and "
            "give the path of the mount"
        )


def check_plain(name: str, value: Any) -> None:
    """Raises TypeError unless a file can give back an equal value."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_plain(f"{name}[{key!r}]", part)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            check_plain(f"{name}[{index}]", part)
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; settings may be texts, "
            "numbers, None, lists and dicts of such"
        )


def _check_parameters(optimizer: ElasticOptimizer, parts: Mapping[str, Any]) -> None:
    """Raises ValueError unless the modules have all that is trained."""
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


def check_version(state: Any, version: int, path: Path) -> None:
    """Raises ValueError unless the file is of this form."""
    found = state.get("version") if isinstance(state, dict) else None
    if found != version:
        raise ValueError(
            f"{path} is of version {found!r}, and this library reads {version}"
        )


def check_settings(
    saved: Mapping[str, Any], own: Mapping[str, Any], path: Path
) -> None:
    """Raises ValueError, with all differences, unless settings are equal."""
    found = differences(saved, own)
    if found:
        raise ValueError(
            f"{path} is of another run: {'; '.join(found)}. Give the run another "
            "folder, or load(allow_changes=True)"
        )


def check_same_parts(
    saved: Mapping[str, Any], own: Mapping[str, Any], path: Path
) -> None:
    """Raises ValueError unless the run has the parts that were saved."""
    if saved.keys() != own.keys():
        raise ValueError(
            f"{path} has the parts {sorted(saved)}, and this run has {sorted(own)}: "
            "give Checkpointer the same ones"
        )
