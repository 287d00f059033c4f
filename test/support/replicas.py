"""The replica backends under test: a new one is one row."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import xla_replica

HAS_XLA = importlib.util.find_spec("torch_xla") is not None
needs_xla = pytest.mark.skipif(not HAS_XLA, reason="torch_xla is not installed")

# Long enough for a loaded machine, short enough for a test that hangs.
TIMEOUT = 60.0


class Backend(NamedTuple):
    """Where and how many; ``device`` as `xla_replica.launch` takes it."""

    device: str
    num_replicas: int

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT
    ) -> list[Any]:
        """``fn(rank, *args)`` on every replica; ``fn`` at the top of a module."""
        return xla_replica.launch(
            fn, args, self.num_replicas, self.device, timeout=timeout
        )


def _row(device: str, num_replicas: int, slow: bool = False):
    marks = [pytest.mark.slow] if slow else []
    if device == "xla":
        marks += [needs_xla, pytest.mark.xla]
    name = {"cpu": "gloo", "xla": "xla"}[device] if num_replicas > 1 else device
    return pytest.param(
        Backend(device, num_replicas), marks=marks, id=f"{name}-{num_replicas}"
    )


BACKENDS = [
    _row("cpu", 1),
    _row("cpu", 2),
    _row("cpu", 3),
    _row("cpu", 5, slow=True),
    _row("cpu", 8, slow=True),
    _row("xla", 1),
    _row("xla", 2),
    _row("xla", 3),
    _row("xla", 5),
    _row("xla", 8),
]
# One row of each backend and kind, the rest for slow runs: for families whose programs
# take long to compile.
FEW_BACKENDS = [
    _row("cpu", 1),
    _row("cpu", 3),
    _row("cpu", 8, slow=True),
    _row("xla", 1, slow=True),
    _row("xla", 2, slow=True),
    _row("xla", 5, slow=True),
    _row("xla", 8),
]
XLA_BACKENDS = [_row("xla", 1), _row("xla", 8)]
ONE_XLA_BACKEND = [_row("xla", 1), _row("xla", 8, slow=True)]
SEVERAL_REPLICAS = [_row("cpu", 3), _row("xla", 3)]
