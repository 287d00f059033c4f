"""The torch_xla backend: TPUs through PJRT, on one host or many, and XLA:CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from xla_replica.backends.replica import Replica, listed
from xla_replica.common.trees import Tensors, map_tensors
from xla_replica.device.device_traits import traits
from xla_replica.device.seeding import check_seed
from xla_replica.errors import ReplicaError


class XlaReplica(Replica):
    """The calling thread's torch_xla device as a replica.

    Construct it in a replica (after ``launch``), never before: torch_xla determines the
    number of replicas once per process, when it is first asked.

    Args:
        reason: Why `current` chose this backend, for people.

    Attributes:
        waiting: Surrounds what waits for the device, and so for other replicas.
    """

    waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def __init__(self, reason: str) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        if xr.is_spmd():
            raise ReplicaError(
                "this process uses SPMD (xr.use_spmd, FSDPv2), which has no replicas: "
                "leave SPMD out, or train with an ordinary optimizer"
            )
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if processes > xr.world_size():
            raise ReplicaError(
                f"torchrun started {processes} processes, but torch_xla knows "
                f"{xr.world_size()}: start them by xla_replica.launch"
            )
        self._torch_xla, self._xm = torch_xla, xm
        self._on_cpu = xr.device_type() == "CPU"
        rank, device = xr.global_ordinal(), torch_xla.device()
        super().__init__(rank, xr.world_size(), device, reason)

    def _all_reduce_(self, tensors: list[torch.Tensor]) -> None:
        totals = [self._widened(tensor) for tensor in tensors]
        # The list form reduces in place, all tensors in one collective.
        self._xm.all_reduce(self._xm.REDUCE_SUM, totals)
        for tensor, total in zip(tensors, totals):
            if total is not tensor:
                tensor.copy_(total)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns bfloat16 as float32 on XLA:CPU, whose collectives do not have it."""
        is_narrow = tensor.dtype == torch.bfloat16 and self._on_cpu
        return tensor.float() if is_narrow else tensor

    def all_max(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach().clone()
        if self.num_replicas > 1:
            self._xm.all_reduce(self._xm.REDUCE_MAX, [value])
        return value

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach().unsqueeze(0)
        if self.num_replicas == 1:
            return value.clone()
        # Pinned layouts make torch_xla pad with the replica's own ordinal: a
        # different graph on every replica, which hangs.
        gathered = self._xm.all_gather(self._widened(value), dim=0, pin_layout=False)
        return gathered.to(tensor.dtype)

    def _all_to_all(self, value: torch.Tensor) -> torch.Tensor:
        sent = self._widened(value)
        return self._xm.all_to_all(sent, 0, 0, self.num_replicas).to(value.dtype)

    def _broadcast_(self, tensors: list[torch.Tensor], source: int) -> None:
        # Selected, not multiplied: a NaN on other replicas must not survive.
        is_source = self.scalar(self.rank == source, torch.bool).reshape(())
        values = [tensor.detach() for tensor in tensors]
        # Truth values cannot be summed.
        values = [v.to(torch.uint8) if v.dtype == torch.bool else v for v in values]
        chosen = [torch.where(is_source, v, torch.zeros_like(v)) for v in values]
        self.all_reduce_(chosen)
        for tensor, value in zip(tensors, chosen):
            tensor.copy_(value)

    def sync(self) -> None:
        self._torch_xla.sync()

    def wait(self) -> None:
        # sync(wait=True) returns before the execution ends.
        self._torch_xla.sync()
        with self.waiting():
            self._xm.wait_device_ops([str(self._xm._xla_real_device(self.device))])

    def fetch(self, tensors: Tensors) -> list[torch.Tensor]:
        tensors = listed("fetch", tensors)
        if not tensors:
            return []
        # Syncing first keeps the pending work in the one graph that every step runs.
        self.sync()
        with self.waiting():
            detached = [tensor.detach() for tensor in tensors]
            fetched = self._torch_xla._XLAC._xla_get_cpu_tensors(detached)
        # It returns tensors that are on the host, such as Adam's steps, themselves.
        pairs = zip(tensors, fetched)
        return [copy.clone() if traits(t).is_host else copy for t, copy in pairs]

    def send(self, batch: Any) -> Any:
        # Not tensor.to(): in the loader's thread its unfinished copy would be one of
        # the live tensors that the training loop syncs, and would change the graph.
        def move(tensor: torch.Tensor) -> torch.Tensor:
            if not traits(tensor).is_host:
                return tensor.to(self.device)
            return self._xm.send_cpu_data_to_device([tensor], self.device)[0]

        return map_tensors(batch, move)

    def seed(self, seed: int) -> None:
        number = check_seed(seed) + self.rank
        self._torch_xla.manual_seed(number, device=self.device)

    def rng_state(self) -> torch.Tensor:
        # Cut first: between cuts the state is that of the unfinished graph.
        self.sync()
        state = self._xm.get_rng_state(str(self.device))
        return torch.tensor(list(state.to_bytes(8, "little")), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.sync()
        number = int.from_bytes(bytes(state.tolist()), "little")  # of 64 bits
        self._xm.set_rng_state(number, str(self.device))
