"""How two runs differ, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
    called: Mapping[str, str] | None = None,
) -> list[str]:
    """What was and is, of every setting that has changed; a missing one was None.

    Args:
        saved: Settings by name.
        own: The same of the run that would go on.
        called: Names of the settings to compare, in their order, and what people call
            them. Default: all, by name.

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
