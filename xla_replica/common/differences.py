"""How the settings of two runs differ, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
    called: Mapping[str, str] | None = None,
) -> list[str]:
    """Returns what was and what is, for every setting that has changed.

    A setting that one side lacks was, or is, None.

    Args:
        saved: Settings by name, as they were saved.
        own: The settings of the run that is to continue.
        called: The names of the settings to compare, in their order, and what people
            call them. Default: all, by name.

    >>> differences({"lr": 0.1, "seed": 1}, {"lr": 0.2, "seed": 1, "width": 3})
    ['lr was 0.1 and is 0.2', 'width was None and is 3']
    """
    if called is None:
        called = {name: name for name in sorted(saved.keys() | own.keys())}
    return [
        f"{what} was {saved.get(name)!r} and is {own.get(name)!r}"
        for name, what in called.items()
        if saved.get(name) != own.get(name)
    ]


def check_same(
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
    what: str,
    remedy: str = "",
    called: Mapping[str, str] | None = None,
) -> None:
    """Raises ValueError, which lists all differences, unless the settings agree.

    Args:
        saved, own, called: As for `differences`.
        what: Begins the message, such as "load_state_dict: the state of another
            sampler".
        remedy: Ends the message: what to do.
    """
    found = differences(saved, own, called)
    if found:
        raise ValueError(f"{what}: {'; '.join(found)}{'. ' if remedy else ''}{remedy}")
