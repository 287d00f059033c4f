"""The torch.distributed backend: gloo, nccl, or TorchTPU's group on a TPU.

It uses the default process group, whatever its backend, and only the collectives that
every backend has (TorchTPU's group lacks the coalesced ones).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._utils import _take_tensors

from xla_replica.backends.local import default_device, in_use
from xla_replica.backends.replica import Replica
from xla_replica.backends.sharded_sum import ShardedParameters, living
from xla_replica.common.trees import Tensors, copy_parts_
from xla_replica.device.sharded import is_sharded, local
from xla_replica.errors import ReplicaError

# Gradients are summed in flat buckets: one call per bucket is fast, and the second
# copy of the gradients never exceeds one bucket (or the largest tensor).
BUCKET_BYTES = 32 * 2**20


def process_group() -> str | None:
    """Returns the backend of the default process group, None where there is none."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    name = torch.distributed.get_backend()
    # What init_process_group() without a backend chose is in the configuration alone.
    return torch.distributed.get_backend_config() if name == "undefined" else name


def kinds_served() -> set[str]:
    """Returns the kinds of devices whose tensors the default process group sums."""
    pairs = torch.distributed.get_backend_config().split(",")
    return {pair.split(":")[0] for pair in pairs}


# The devices that `launch` has chosen for this process while it runs, nested ones last.
_chosen: list[torch.device] = []


@contextlib.contextmanager
def computing_on(device: torch.device) -> Iterator[DistributedReplica]:
    """Makes ``device`` that of this process in the default group, in all threads.

    Gives the replica that this process is.
    """
    _chosen.append(device)
    try:
        yield DistributedReplica("a process of this job", device)
    finally:
        _chosen.pop()


def device_in_group() -> torch.device:
    """Returns where this process of the default group computes.

    That is the accelerator where there is one. A group for the CPU alone, 'cpu:gloo',
    leaves it unused.

    Raises:
        ReplicaError: The group cannot sum tensors there.
    """
    if _chosen:
        return _chosen[-1]
    only_cpu = kinds_served() == {"cpu"}
    device = torch.device("cpu") if only_cpu else default_device()
    return chosen_by_script(device)


def chosen_by_script(kind: torch.device) -> torch.device:
    """Returns the device of this kind that the script, which has joined, has chosen.

    It has by ``init_process_group(device_id=...)``, or by the device that it uses now.

    Raises:
        ReplicaError: The default process group does not sum tensors there. It may
            return them unsummed, so that each replica trains alone.
    """
    served = kinds_served()
    if kind.type not in served:
        raise ReplicaError(
            f"the process group {process_group()} sums tensors on "
            f"{' and '.join(sorted(served))}, but this process computes on "
            f"{kind.type}: call torch.distributed.init_process_group() without a "
            "backend. To leave an accelerator unused, join 'cpu:gloo'"
        )
    given = torch.distributed.group.WORLD.bound_device_id
    return given if given is not None and given.type == kind.type else in_use(kind)


class DistributedReplica(Replica):
    """This process's rank in the default process group."""

    def __init__(self, reason: str, device: torch.device | None = None) -> None:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        super().__init__(rank, size, device or device_in_group(), reason)
        self.overlaps = self.num_replicas > 1
        self.shards = ShardedParameters(self.num_replicas)

    def _all_reduce_(self, tensors: list[torch.Tensor]) -> None:
        # In groups of one dtype, the same on every replica.
        for bucket in _take_tensors(tensors, BUCKET_BYTES):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            with self._named("all_reduce_", bucket):
                torch.distributed.all_reduce(flat)
            copy_parts_(bucket, flat)

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        with self._named("all_reduce_", [tensor]):
            work = torch.distributed.all_reduce(tensor, async_op=True)

        def wait() -> None:
            with self._named("all_reduce_", [tensor]):
                work.wait()

        return wait

    def all_max(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach().clone()
        with self._named("all_max", [value]):
            torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
        return value

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach().contiguous()
        gathered = [torch.empty_like(value) for _ in range(self.num_replicas)]
        with self._named("all_gather", [value]):
            torch.distributed.all_gather(gathered, value)
        return torch.stack(gathered)

    def _all_to_all(self, value: torch.Tensor) -> torch.Tensor:
        value = value.contiguous()
        received = torch.empty_like(value)
        with self._named("all_to_all", [value]):
            torch.distributed.all_to_all_single(received, value)
        return received

    def _broadcast_(self, tensors: list[torch.Tensor], source: int) -> None:
        for tensor in tensors:
            if is_sharded(tensor):
                self._broadcast_part_(tensor, source)
                continue
            value = tensor.detach().contiguous()
            with self._named("broadcast_", [value]):
                torch.distributed.broadcast(value, source)
            tensor.copy_(value)

    def _broadcast_part_(self, tensor: Any, source: int) -> None:
        """Replaces this replica's part by that of the copy that ``source`` is in."""
        mesh, value = tensor.device_mesh, local(tensor)
        there = (mesh.mesh == source).nonzero()[0].tolist()
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate() and value.numel():
                where = {"group": mesh.get_group(dim), "group_src": there[dim]}
                with self._named("broadcast_", [value]):
                    torch.distributed.broadcast(value, **where)

    def check_parameters(self, parameters: Tensors) -> None:
        self.shards.add(parameters)
        gc.collect()  # a wrapper that nothing refers to is not in the way
        if _are_wrapped(parameters):
            raise TypeError(
                "these are parameters of a DistributedDataParallel model, which sums "
                "their gradients in every backward pass. Train the bare module, "
                "model.module in place of model"
            )

    @contextlib.contextmanager
    def _named(self, verb: str, tensors: Tensors) -> Iterator[None]:
        """Raises a ReplicaError with the replica, the collective and usual causes."""
        device = tensors[0].device
        if device.type == "xla":
            raise ReplicaError(
                f"replica {self.rank}: the {process_group()} process group would "
                f"return a tensor on {device} unsummed. Start the job with "
                "launch(fn, device='xla'), or keep the model on the CPU",
                self.rank,
            )
        try:
            yield
        except RuntimeError as error:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise ReplicaError(
                f"replica {self.rank} of {self.num_replicas} failed in {verb} of "
                f"{len(shapes)} {tensors[0].dtype} tensors of shapes {shapes[:4]}: a "
                "peer raised, hung, left early, or brought other tensors. The "
                f"{process_group()} group says: {error}",
                self.rank,
            ) from error


def _are_wrapped(parameters: Tensors) -> bool:
    """Returns whether a DistributedDataParallel wrapper has any of these parameters.

    Neither they nor their modules know of it.
    """
    wrappers = living(torch.nn.parallel.DistributedDataParallel)
    wrapped = {id(each) for wrapper in wrappers for each in wrapper.parameters()}
    return not wrapped.isdisjoint(map(id, parameters))
