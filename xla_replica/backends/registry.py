"""The backends, one row each, and which replica the caller is (`current`).

A row says everything that is known of a backend: how a thread finds out that it is one
of its replicas, how that `Replica` is made, and how `launch` starts them. The rows of
this package are in `starting/`; `register_backend` adds others.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xla_replica.backends.local import LocalReplica
from xla_replica.backends.replica import Replica
from xla_replica.common.arguments import check_type
from xla_replica.errors import ReplicaError


class Job(NamedTuple):
    """What `launch` was asked to run.

    Attributes:
        fn: The function to call as ``fn(rank, *args)`` on every replica.
        args: The arguments after the rank.
        num_replicas: At least 1; None for as many as the backend has devices.
        timeout: Seconds that a replica may be late.
        is_started: Whether something else, such as torchrun, has started the replicas
            and this process is one of them: then ``fn`` is called here.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    num_replicas: int | None
    timeout: float
    is_started: bool


class Backend(NamedTuple):
    """What is known of a backend; the arguments of `register_backend`."""

    find: Callable[[], str | None]
    replica: Callable[[str], Replica]
    launch: Callable[[Job], list[Any]] | Any  # None: something else starts replicas
    preference: Callable[[Job], int]
    has_any_number: Callable[[], bool]


# By the names that `launch` takes; added to by `register_backend`.
DEVICES: dict[str, Backend] = {}


def register_backend(
    device: str,
    find: Callable[[], str | None],
    replica: Callable[[str], Replica],
    launch: Callable[[Job], list[Any]] | None = None,
    *,
    preference: Callable[[Job], int] = lambda job: 0,
    has_any_number: Callable[[], bool] = lambda: True,
) -> None:
    """Adds a backend, for `current` and ``launch(device=device)``.

    A backend of the same name is replaced. If the replicas compute on a kind of device
    other than a CPU, a GPU or XLA, describe that with `register_device`.

    Args:
        device: The backend's name, as `launch` takes it.
        find: Returns why the calling thread is one of the backend's replicas, for
            people, or None where it is not. `current` asks the backend that was added
            last first.
        replica: Makes the calling thread's replica; called with that reason.
        launch: Runs a `Job` and returns the results by rank, or, where the job
            ``is_started``, this replica's result alone. None where something else
            starts the replicas.
        preference: Returns how much ``launch(device=None)`` prefers this backend for a
            job; the highest is chosen. With 0, it is used only if it is asked for.
        has_any_number: Returns whether it can start any number of replicas, as on a
            CPU, and not only as many as there are devices.
    """
    DEVICES.pop(device, None)  # `current` asks the last one first
    DEVICES[device] = Backend(find, replica, launch, preference, has_any_number)


# Where launchers say how many processes they have started: torchrun and whoever joins
# them to a group, Open MPI, MPICH and Intel MPI, Slurm's srun.
_NUMBERS_OF_PROCESSES = "WORLD_SIZE OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS"

_bound = threading.local()


@contextlib.contextmanager
def bound(replica: Replica) -> Iterator[None]:
    """Makes ``replica`` the calling thread's `current` inside the block."""
    before = getattr(_bound, "replica", None)
    _bound.replica = replica
    try:
        yield
    finally:
        _bound.replica = before


def current() -> Replica:
    """Returns the replica that the caller runs in; ``reason`` says how it was found.

    In this order: the replica that `launch` started; one that a registered backend
    finds, such as that of an initialised ``torch.distributed`` process group, or a
    torch_xla device, if the script has imported torch_xla and chosen one
    (``PJRT_DEVICE``); otherwise the only replica of its job.

    Raises:
        ReplicaError: torchrun, mpirun or srun started several processes, but nothing
            has joined them to a group yet: each would silently train a model of its
            own.
    """
    replica = getattr(_bound, "replica", None) or found_replica()
    if replica is None:
        check_is_alone()
        return LocalReplica()
    return replica


def found_replica(but_by: str = "") -> Replica | None:
    """Returns the replica that the first backend finds, without that of this name."""
    for name, backend in reversed(DEVICES.items()):
        reason = None if name == but_by else backend.find()
        if reason is not None:
            return backend.replica(reason)
    return None


def given_or_current(replica: Replica | None) -> Replica:
    """Returns the argument ``replica`` of a caller, by default `current`.

    Raises TypeError if it is something else.
    """
    if replica is None:
        return current()
    allowed = "an xla_replica.Replica, such as current() returns, or None for that one"
    check_type("replica", replica, Replica, allowed)
    return replica


def check_is_alone() -> None:
    """Raises ReplicaError if a launcher has started this process as one of several."""
    name = next((n for n in _NUMBERS_OF_PROCESSES.split() if n in os.environ), None)
    if name is not None and os.environ[name] != "1":
        raise ReplicaError(
            f"{name}={os.environ[name]} says that this process is one of several, but "
            "torch.distributed is not initialised. Run the training function through "
            "xla_replica.launch, under torchrun or with RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT set for every process; WORLD_SIZE=1 makes each a job of "
            "its own. Or call torch.distributed.init_process_group() first"
        )
