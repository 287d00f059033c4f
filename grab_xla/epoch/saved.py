"""Whether a saved state belongs to a sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSION = 1  # of the form of `GraBSampler.state_dict`
_MUST_AGREE = (
    "version",
    "balance_type",
    "options",
    "settings",
    "num_samples",
    "num_columns",
)


def check_same(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ValueError unless ``state`` comes from a sampler like ``own``'s.

    All differences are listed.
    """
    missing = sorted(own.keys() - state.keys())
    if missing:
        raise ValueError(f"load_state_dict: the state has no {', '.join(missing)}")
    differences = [
        f"{name} is {state[name]!r} in the state and {own[name]!r} here"
        for name in _MUST_AGREE
        if state[name] != own[name]
    ]
    if differences:
        raise ValueError(
            "load_state_dict: this is the state of another sampler: "
            + "; ".join(differences)
        )
