"""What a replica is and how replicas sum: on TPUs, GPUs, or N of them on one CPU.

The only package that names torch_xla, torch_tpu or torch.distributed. None of them is
imported before a backend is chosen.
"""

from xla_replica.backends.counters import Counts, count
from xla_replica.backends.local import LocalReplica
from xla_replica.backends.registry import DEVICES, Job, current, register_backend
from xla_replica.backends.replica import Replica
from xla_replica.device.comparisons import comparable, where_finite
from xla_replica.device.device_traits import (
    DeviceTraits,
    full_matmul_precision,
    register_device,
    traits,
)
from xla_replica.device.gradients import (
    AccumulationHook,
    AccumulationNote,
    add_gradients,
    backward,
    grad,
)
from xla_replica.device.lazy_operations import computed_once, lazy_operation
from xla_replica.device.loader import DeviceLoader
from xla_replica.device.seeding import seeded
from xla_replica.device.sharded import is_sharded, refuse_sharded
from xla_replica.errors import MemberLost, ReplicaError, Stopped, Superseded
from xla_replica.members.supervisor import lighthouse
from xla_replica.starting import distributed, live, xla  # noqa: F401  the rows
from xla_replica.starting.launcher import default_num_replicas, launch
from xla_replica.stopping import (
    StopRequest,
    catch_signals,
    request_stop,
    stop_requested,
)

__all__ = [
    "DEVICES", "AccumulationHook", "AccumulationNote", "Counts", "DeviceLoader",
    "DeviceTraits", "Job", "LocalReplica", "MemberLost", "Replica", "ReplicaError",
    "StopRequest", "Stopped", "Superseded", "add_gradients", "backward",
    "catch_signals", "comparable", "computed_once", "count", "current",
    "default_num_replicas", "full_matmul_precision", "grad", "is_sharded", "launch",
    "lazy_operation", "lighthouse", "refuse_sharded", "register_backend",
    "register_device", "request_stop", "seeded", "stop_requested", "traits",
    "where_finite",
]  # fmt: skip
