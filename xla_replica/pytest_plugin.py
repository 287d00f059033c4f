"""A pytest fixture that runs a test's function on N replicas.

Name the plugin in the ``conftest.py`` at the root of your tests; it is not loaded
otherwise, since it imports torch::

    pytest_plugins = ["xla_replica.pytest_plugin"]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from xla_replica.starting.launcher import launch

# What a replica that does not come costs a test.
_TIMEOUT = 60.0


@pytest.fixture
def xla_replicas() -> Callable[..., list[Any]]:
    """Returns ``run(num_replicas, fn, *args)``, which returns the results by rank.

    ``run`` calls ``fn(rank, *args)``, a function at the top level of the test's module,
    on emulated XLA replicas with real collectives (on a TPU, on its cores), as
    ``launch(device="xla")`` does, and raises what that raises: an exception in a
    replica is a `ReplicaError` whose message has the replica's traceback. Its keywords
    ``device`` and ``timeout`` are those of `launch`; a replica may be 60 s late.
    """

    def run(
        num_replicas: int,
        fn: Callable[..., Any],
        *args: Any,
        device: str | None = "xla",
        timeout: float = _TIMEOUT,
    ) -> list[Any]:
        __tracebackhide__ = True
        return launch(fn, args, num_replicas, device, timeout=timeout)

    return run
