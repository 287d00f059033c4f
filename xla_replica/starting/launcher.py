"""Starts replicas: on the chips of a TPU, on GPUs, or N of them on one CPU."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from xla_replica.backends.distributed import process_group
from xla_replica.backends.registry import DEVICES, Job
from xla_replica.common.arguments import (
    check_choice,
    check_function,
    check_integer,
    check_number,
    check_type,
)

logger = logging.getLogger(__name__)

_LONGEST = 2_000_000.0  # seconds; more milliseconds do not fit into gloo's 32 bits


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_replicas: int | None = None,
    device: str | None = None,
    *,
    timeout: float = 300.0,
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on every replica and returns their results by rank.

    On a TPU slice of several hosts every host calls it, and has its replicas' results.

    Inside ``fn``, `current` is the replica. Where it runs:

    ============= =============================================================
    device        replicas
    ============= =============================================================
    'xla'         every chip of the TPU through torch_xla; without a TPU,
                  ``num_replicas`` XLA replicas with real collectives on this CPU
    'accelerator' a process per device of the kind that torch names (GPUs, or TPUs
                  through TorchTPU), joined by torch's process group for them
    'cpu'         processes on this CPU, joined by gloo
    None          a TPU through torch_xla, else the accelerator, else one replica in
                  this process; or, if more are asked for, 'xla' where torch_xla is
                  installed, else 'cpu'
    ============= =============================================================

    `register_backend` adds others. Under torchrun, wherever else ``WORLD_SIZE`` is
    above 1, and after ``init_process_group`` this process is one replica already: its
    group is joined, ``fn`` is called here, and the list holds this replica's result
    alone.

    Args:
        fn: A function defined at the top level of a module. Where replicas are other
            processes, these import the script, so it calls `launch` under
            ``if __name__ == "__main__":``.
        args: A tuple of the arguments after the rank; picklable, as is the result.
        num_replicas: Default: every device there is, one on a CPU.
        device: One of the table.
        timeout: Seconds that a replica may be late, at a collective or after its peers
            have returned, before the run is ended with an error. On emulated replicas
            and on a TPU an exception ends it at once. At most 2,000,000, 23 days.

    Raises:
        Stopped: At least one replica raised it; raised when all have ended.
        SystemExit: A replica called ``sys.exit`` with a status other than 0.
        ReplicaError: A replica in another process raised (its exception is
            ``__cause__``), hung, left early or differed from its peers. An exception of
            a replica in this process is raised unchanged. Or the process group that
            the script has joined cannot sum tensors where this process computes.
        RuntimeError: A script without this guard is imported by such a process.
        ValueError: ``num_replicas`` or ``device`` does not exist here.
        TypeError: ``fn`` is not a function, ``args`` not a tuple, ``num_replicas`` not
            an integer or ``timeout`` not a number, or ``fn`` or ``args`` cannot be sent
            to another process.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "launch was called while a process of the replicas imports the script, as "
            'each of them does: call it under `if __name__ == "__main__":`'
        )
    check_function("fn", fn)
    check_type("args", args, (tuple, list), "a tuple of the arguments after the rank")
    if num_replicas is not None:
        num_replicas = check_integer("num_replicas", num_replicas, least=1)
    check_number("timeout", timeout, most=_LONGEST, above=0)
    job = Job(fn, args, num_replicas, timeout, _is_one_of_several_processes())
    device = _chosen(device, job)
    if not job.is_started:
        logger.info("launching %s replicas on %s", num_replicas or "all", device)
    return DEVICES[device].launch(job)


def default_num_replicas(device: str | None = None, on_cpu: int = 1) -> int | None:
    """Returns a script's default for ``launch(num_replicas=)``.

    Args:
        device: As for `launch`; None is the best that there is.
        on_cpu: How many replicas a CPU shall have, at least 1.

    Returns:
        None, which means all there are, under torchrun, on a TPU and on GPUs; on a CPU,
        where any number can be had, ``on_cpu``.

    Raises:
        ValueError, TypeError: The device is unknown, or ``on_cpu`` is less than 1.
    """
    check_integer("on_cpu", on_cpu, least=1)
    job = Job(lambda rank: None, (), on_cpu, 1.0, _is_one_of_several_processes())
    has_any_number = DEVICES[_chosen(device, job)].has_any_number()
    return on_cpu if has_any_number and not job.is_started else None


def _chosen(device: str | None, job: Job) -> str:
    """Returns the device that a job is run on; raises ValueError if it cannot be."""
    startable = [name for name, backend in DEVICES.items() if backend.launch]
    check_choice("device", device, [*startable, None])
    return device or max(DEVICES, key=lambda name: DEVICES[name].preference(job))


def _is_one_of_several_processes() -> bool:
    """Returns whether something else has made this process a replica."""
    number = os.environ.get("WORLD_SIZE", "1")
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ or number != "1"
    return process_group() is not None or is_launched
