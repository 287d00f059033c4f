"""Which replica the caller is: `current`, and the binding that emulation uses."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from xla_replica.backends.replica import LocalReplica, Replica
from xla_replica.errors import ReplicaError

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
    """The replica that the caller runs in; ``reason`` says how it was found.

    In this order: the replica that `launch` started; an initialised
    ``torch.distributed`` process group; a torch_xla device, if the script has imported
    torch_xla and chosen one (``PJRT_DEVICE``); otherwise the only replica of its job.

    Raises:
        ReplicaError: torchrun started several processes, but nothing has joined them
            to a group yet: each would silently train a model of its own.
    """
    replica = getattr(_bound, "replica", None)
    if replica is not None:
        return replica
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        backend = dist.get_backend()
        reason = f"torch.distributed is initialised with {backend}"
        if backend == "xla":
            from xla_replica.backends.xla import XlaReplica

            return XlaReplica(reason)
        from xla_replica.backends.distributed import DistributedReplica

        return DistributedReplica(reason)
    if "torch_xla" in sys.modules and os.environ.get("PJRT_DEVICE"):
        from xla_replica.backends.xla import XlaReplica

        return XlaReplica(f"PJRT_DEVICE={os.environ['PJRT_DEVICE']}")
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if num_processes != "1":
        raise ReplicaError(
            f"WORLD_SIZE={num_processes} says that this process is one of several, but "
            "torch.distributed is not initialised. Run the training function through "
            "xla_replica.launch, or call torch.distributed.init_process_group() first"
        )
    return LocalReplica()
