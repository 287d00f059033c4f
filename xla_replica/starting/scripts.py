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

from xla_replica.emulated.emulator import environment
from xla_replica.errors import ReplicaError
from xla_replica.starting.emulated import run_emulated


class ScriptRunner:
    """Runs a script whose launches start ``num_replicas`` emulated replicas.

    Args:
        num_replicas: How many.
        timeout: Seconds that a replica may be late, as in `launch`.
        as_tpu: Whether ``xm.xla_device_hw`` says that the devices are those of a TPU.

    Attributes:
        num_launches: How often the script has started replicas.
    """

    def __init__(self, num_replicas: int, timeout: float, as_tpu: bool) -> None:
        self._num_replicas, self._timeout = num_replicas, timeout
        self._prepare = _say_tpu if as_tpu else None
        self.num_launches = 0

    def run(self, script: str, arguments: list[str], is_module: bool) -> None:
        """Runs a file, or a module as ``python -m`` does, as ``__main__``."""
        # The script's own process is none of the replicas, but torch_xla and what is
        # forked read these variables once.
        os.environ.update(environment(self._num_replicas))
        from torch_xla._internal import pjrt

        pjrt.run_multiprocess = self._run_multiprocess
        if self._prepare is not None:
            self._prepare()
        sys.argv = [script, *arguments]
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            path = os.path.abspath(script)
            # As for python. The folder that was there may be where this package is.
            sys.path[:1] = [str(Path(path).parent), str(Path(__file__).parents[2])]
            runpy.run_path(path, run_name="__main__")

    def _run_multiprocess(
        self,
        fn: Callable[..., Any],
        *args: Any,
        start_method: str = "spawn",
        **kwargs: Any,
    ) -> dict[int, Any]:
        """Does what torch_xla's function of this name does.

        The script is imported anew, whatever the ``start_method``.
        """
        del start_method
        import torch_xla

        if torch_xla._XLAC._xla_runtime_is_initialized():
            raise RuntimeError(
                "this process has used an XLA device before it starts replicas, which "
                "torch_xla does not allow: make tensors and ask for devices in the "
                "function that torch_xla.launch runs"
            )
        self.num_launches += 1
        try:
            results = run_emulated(
                _call_without_rank,
                (functools.partial(fn, *args, **kwargs),),
                self._num_replicas,
                self._timeout,
                prepare=self._prepare,
            )
        except ReplicaError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from error  # a script may catch it
        for result in results:
            if isinstance(result, SystemExit):
                raise result
        return dict(enumerate(results))


def _call_without_rank(rank: int, call: Callable[[], Any]) -> Any:
    """Calls what torch_xla has prepared, which asks for the rank itself.

    Returns the exception of ``sys.exit(0)``, after which torch_xla's parent exits.
    """
    del rank
    try:
        return call()
    except SystemExit as exited:
        if exited.code not in (None, 0):
            raise
        return exited


def _say_tpu() -> None:
    """Makes ``xm.xla_device_hw`` return "TPU"."""
    import torch_xla.core.xla_model as xm

    xm.xla_device_hw = functools.wraps(xm.xla_device_hw)(lambda device: "TPU")
