"""TorchTPU's runtime, which binds every process to one device.

Of other kinds of accelerators, such as GPUs, a process sees every device and chooses
one. TorchTPU 0.2 chooses itself, from the variables that a launcher gives every process
and from addresses and a topology that the launcher's parent must compute, once for all
of them. A process then sees its device as the only one. It cannot be forked from a
process that has loaded the runtime, which importing torch does.
"""

from __future__ import annotations

import contextlib
import os
from unittest import mock
from urllib import request

import torch

from xla_replica.errors import ReplicaError

# The kinds of devices with such a runtime.
BOUND_KINDS = ("tpu",)
# What the parent sets, without which a process of several fails.
_REQUIRED = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")
# Where a TPU VM's metadata lists the hosts of its slice, as "name:id:address,...".
_HOSTS = (
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
    "worker-network-endpoints"
)


def check_is_only_host(device: torch.device) -> None:
    """Raises ValueError if this host is one of several of a slice.

    GKE sets their names; elsewhere the metadata server knows them, if there is one.
    """
    if device.type not in BOUND_KINDS:
        return
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES")
    if hosts is None and "TPU_SKIP_MDS_QUERY" not in os.environ:
        asked = request.Request(_HOSTS, headers={"Metadata-Flavor": "Google"})
        with contextlib.suppress(OSError), request.urlopen(asked, timeout=5) as answer:
            hosts = answer.read().decode()
    number = len((hosts or "").split(","))
    if number > 1:
        raise ValueError(
            f"this host is one of {number} of its slice, and launch trains on it "
            "alone: start torchrun on every host, or set TPU_WORKER_HOSTNAMES=localhost"
        )


def variables_of_run(kind: torch.device, num_processes: int) -> dict[str, str]:
    """Returns the environment that all processes of a run need.

    Raises RuntimeError or ValueError if the runtime cannot have so many.
    """
    from torch.tpu import distributed  # torch_tpu's

    with mock.patch.dict(os.environ):
        distributed.set_tpu_launch_env(nproc_per_node=num_processes)
        variables = dict(os.environ)
    # It keeps what the environment, or a call before this one, has chosen.
    addresses = variables["TORCH_TPU_SLICEBUILDER_ADDRESSES"]
    if len(addresses.split(",")) != num_processes:
        raise ValueError(
            f"num_replicas={num_processes} on {kind.type!r}, but TORCH_TPU_SLICEBUILDER"
            f"_ADDRESSES={addresses} is for another number: leave TORCH_TPU_* unset; "
            "use torchrun for several hosts"
        )
    return variables


def check_variables(device: torch.device) -> None:
    """Raises ReplicaError if what started this process has not set all variables."""
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if device.type not in BOUND_KINDS or num_processes == "1":
        return
    missing = [name for name in _REQUIRED if name not in os.environ]
    if missing:
        raise ReplicaError(
            f"this process is one of {num_processes} on {device.type!r}, but "
            f"{' and '.join(missing)} must be set before the first of them starts; "
            "before torchrun, in its shell: eval $(python -m torch.tpu.distributed | "
            "sed 's/^/export /')"
        )
