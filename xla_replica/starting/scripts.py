"""Scripts that call torch_xla's launch, unmodified, on emulated replicas.

`torch_xla.launch` and `xmp.spawn` start their processes by one function of torch_xla,
`pjrt.run_multiprocess`, which is replaced. Everything else is torch_xla's: which
arguments there are, and what a script must not do before.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xla_replica.errors import ReplicaError, Stopped
from xla_replica.starting.child_process import run_in_children
from xla_replica.starting.xla import EmulatedRuntime, check_no_device_is_used


def run_script(
    script: str, arguments: list[str], is_module: bool, runtime: EmulatedRuntime
) -> int:
    """Runs a script whose launches start emulated replicas; returns how many it made.

    Args:
        script: A file, or a module that is run as ``python -m`` does, as ``__main__``.
        arguments: The script's.
        is_module: Which of the two it is.
        runtime: That of the replicas of each launch.
    """
    # The script's own process is none of the replicas, but torch_xla and what is
    # forked read these variables once.
    os.environ.update(runtime.variables)
    from torch_xla._internal import pjrt

    num_launches = 0

    def run_multiprocess(fn: Any, *args: Any, **options: Any) -> dict[int, Any]:
        """Does what torch_xla's function of this name does.

        The script is imported anew, whatever the ``start_method``.
        """
        options.pop("start_method", None)
        check_no_device_is_used()
        nonlocal num_launches
        num_launches += 1
        call = functools.partial(fn, *args, **options)
        try:
            results = run_in_children(runtime, _call_without_rank, (call,))
        except ReplicaError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from error  # a script may catch it
        return dict(enumerate(results))

    pjrt.run_multiprocess = run_multiprocess
    sys.argv = [script, *arguments]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        path = os.path.abspath(script)
        # As for python. The folder that was there may be where this package is.
        sys.path[:1] = [str(Path(path).parent), str(Path(__file__).parents[2])]
        runpy.run_path(path, run_name="__main__")
    return num_launches


def _call_without_rank(rank: int, call: Callable[[], Any]) -> Any:
    """Calls what torch_xla has prepared, which asks for the rank itself.

    A script exits with ``sys.exit(0)`` of its replicas.
    """
    try:
        return call()
    except SystemExit as exited:
        if exited.code in (None, 0):
            raise Stopped("sys.exit", 0) from None
        raise
