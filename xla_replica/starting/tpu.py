"""Replicas on the chips of a TPU, started by torch_xla: a process per chip."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from typing import Any

from xla_replica.backends.current_replica import bound
from xla_replica.starting.environment import variables_set
from xla_replica.starting.exit_results import (
    read_endings,
    run_to_end,
    values,
    write_ending,
)
from xla_replica.stopping import Listener, forwarding, listening


def is_installed() -> bool:
    """Whether torch_xla can be imported; does not import it."""
    return importlib.util.find_spec("torch_xla") is not None


def has_tpu() -> bool:
    """Whether torch_xla is installed and would run on a TPU."""
    chosen = os.environ.get("PJRT_DEVICE")
    if not is_installed() or chosen is not None:
        return chosen == "TPU"
    # Importing torch_xla would otherwise choose a device for this whole process.
    with variables_set({"PJRT_SELECT_DEFAULT_DEVICE": "0"}):
        from torch_xla._internal import tpu
    return tpu.num_available_chips() > 0


def run_on_tpu(
    fn: Callable[..., Any], args: tuple[Any, ...], num_replicas: int | None
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on every chip; returns this host's results by rank.

    Under torchrun torch_xla calls it in this process, which is one replica.
    """
    import torch_xla

    os.environ.setdefault("PJRT_DEVICE", "TPU")
    with tempfile.TemporaryDirectory(prefix="xla_replica") as folder:
        task = (fn, args, num_replicas, folder, Listener(folder))
        here = "TORCHELASTIC_RUN_ID" in os.environ
        with listening() if here else forwarding(folder):
            torch_xla.launch(_run_replica, args=task)
        return values(read_endings(folder))


def _run_replica(
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_replicas: int | None,
    folder: str,
    signals: Listener,
) -> None:
    from xla_replica.backends.xla import XlaReplica

    replica = XlaReplica("launched by torch_xla")
    if num_replicas not in (None, replica.num_replicas):
        raise ValueError(
            f"num_replicas={num_replicas}, but there are {replica.num_replicas} "
            "devices and torch_xla uses all of them: leave num_replicas out"
        )
    # Under torchrun the rank that torch_xla passes counts within the host.
    del rank, signals
    with bound(replica):
        ending = run_to_end(fn, replica.rank, args)
    replica.wait()
    write_ending(folder, replica.rank, ending)
