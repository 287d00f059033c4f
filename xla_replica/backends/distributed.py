"""The torch.distributed backend: gloo, nccl, or TorchTPU's group on a TPU.

It uses the default process group, whatever its backend, and only the collectives that
every backend has (TorchTPU's group lacks the coalesced ones).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from xla_replica.backends.replica import Replica, default_device
from xla_replica.errors import ReplicaError

# Gradients are summed in flat buckets: one call per bucket is fast, and the second
# copy of the gradients never exceeds one bucket (or the largest tensor).
BUCKET_BYTES = 32 * 2**20


def process_group() -> str | None:
    """Returns the backend of the default process group, None where there is none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_backend()
    return None


class DistributedReplica(Replica):
    """This process's rank in the default process group."""

    def __init__(self, reason: str, device: torch.device | None = None) -> None:
        super().__init__(
            torch.distributed.get_rank(),
            torch.distributed.get_world_size(),
            default_device() if device is None else device,
            reason,
        )

    def all_reduce_(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for bucket in buckets(tensors, BUCKET_BYTES):
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
                with self._named("all_reduce_", bucket):
                    torch.distributed.all_reduce(flat)
                parts = flat.split([tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, parts):
                    tensor.copy_(part.view_as(tensor))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach().contiguous()
        gathered = [torch.empty_like(value) for _ in range(self.num_replicas)]
        with self._named("all_gather", [value]):
            torch.distributed.all_gather(gathered, value)
        return torch.stack(gathered)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check_parts(tensor)
        value = tensor.detach().contiguous()
        received = torch.empty_like(value)
        with self._named("all_to_all", [value]):
            torch.distributed.all_to_all_single(received, value)
        return received

    def broadcast_(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        self._check_source(source)
        with torch.no_grad():
            for tensor in tensors:
                value = tensor.detach().contiguous()
                with self._named("broadcast_", [value]):
                    torch.distributed.broadcast(value, source)
                tensor.copy_(value)

    def barrier(self) -> None:
        # Its own barrier does nothing on some backends; a sum that is read does.
        flag = torch.ones(1, device=self.device)
        with self._named("barrier", [flag]):
            torch.distributed.all_reduce(flag)
            flag.cpu()

    @contextlib.contextmanager
    def _named(self, verb: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Raises a ReplicaError with the replica, the collective and usual causes."""
        group, device = process_group(), tensors[0].device
        if device.type == "xla":
            raise ReplicaError(
                f"replica {self.rank}: a tensor on {device} was given to the {group} "
                "process group, which would return it unsummed. Start the job with "
                "xla_replica.launch(fn, device='xla'), or keep the model on the CPU",
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
                f"{group} group says: {error}",
                self.rank,
            ) from error


def buckets(
    tensors: Sequence[torch.Tensor], bucket_bytes: int
) -> Iterator[list[torch.Tensor]]:
    """Yields tensors in groups of one device and dtype and about ``bucket_bytes``.

    The grouping depends only on shapes and dtypes, so it is the same on every replica.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    bytes_in_group: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        key = (tensor.device, tensor.dtype)
        groups.setdefault(key, []).append(tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        bytes_in_group[key] = bytes_in_group.get(key, 0) + num_bytes
        if bytes_in_group[key] >= bucket_bytes:
            bytes_in_group[key] = 0
            yield groups.pop(key)
    yield from groups.values()
