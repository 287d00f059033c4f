"""Checkpoints of a training run: one file, whole or not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


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
