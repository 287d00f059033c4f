"""The differences between the settings of two runs, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
    called: Mapping[str, str] | None = None,
) -> list[str]:
    """Returns the saved and the present value of every setting that has changed.

    A setting that is missing on one side counts as None. ``called`` has the names of
    those to compare, in this order, each with what people call it; default: all.

    >>> differences({"lr": 0.1, "seed": 1}, {"lr": 0.2, "seed": 1, "width": 3})
    ['lr was 0.1 and is 0.2', 'width was None and is 3']
    """
    if called is None:
        called = {name: name for name in sorted(saved.keys() | own.keys())}
    pairs = [(what, saved.get(name), own.get(name)) for name, what in called.items()]
    return [f"{what} was {a!r} and is {b!r}" for what, a, b in pairs if a != b]


def check_same(
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
    what: str,
    remedy: str = "",
    called: Mapping[str, str] | None = None,
) -> None:
    """Raises ValueError unless the settings agree.

    The message is ``what``, such as "load_state_dict: the state of another sampler",
    all `differences`, and ``remedy``.
    """
    found = differences(saved, own, called)
    if found:
        raise ValueError(f"{what}: {'; '.join(found)}{'. ' if remedy else ''}{remedy}")
