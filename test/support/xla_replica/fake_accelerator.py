"""An accelerator that is not there, for scripts: torch names it, its group is gloo.

Its tensors are on the CPU; everything else is torch's own: `torch.accelerator`, devices
such as ``metal:1``, the process group's backend and the devices that it serves.
"""

import os
import sys
import types
from typing import Any

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode


class _OnCPU(TorchFunctionMode):
    """Replaces the accelerator by the CPU in the arguments of torch's functions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def _real(self, value: Any) -> Any:
        is_fake = isinstance(value, torch.device) and value.type == self.kind
        return torch.device("cpu") if is_fake else value

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args = [self._real(value) for value in args]
        kwargs = {name: self._real(value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _barrier() -> None:
    # torch's allocates on the accelerator.
    torch.distributed.group.WORLD._get_backend(torch.device("cpu")).barrier().wait()


def install(kind: str, count: int = 2) -> types.ModuleType:
    """Makes ``kind`` the accelerator of this process; returns its module in torch."""
    torch.utils.rename_privateuse1_backend(kind)
    module = types.ModuleType(f"torch.{kind}")
    module.chosen = []  # by set_device
    module.is_available = lambda: True
    module.device_count = lambda: count
    module.set_device = module.chosen.append
    module.default_generators = tuple(torch.Generator() for _ in range(count))
    module.synchronize = lambda device=None: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module(kind, module)
    torch.accelerator.current_device_index = lambda: [0, *module.chosen][-1]
    group, kinds = torch.distributed.ProcessGroupGloo, [kind, "cpu"]
    torch.distributed.Backend.register_backend(f"{kind}_dist", group, devices=kinds)
    torch.distributed.barrier = _barrier
    _OnCPU(kind).__enter__()
    return module


def install_torch_tpu(count: int = 2) -> None:
    """Installs an accelerator as TorchTPU's, with what it refuses beside torch 2.13."""
    module = install("tpu", count)

    def get_rng_state(device: Any = "tpu") -> torch.Tensor:
        raise RuntimeError("get_rng_state is internal to TorchTPU")

    def set_device(index: int) -> None:
        raise ValueError(f"Cannot set TPU device to index {index}")

    resolved: dict[str, str] = {}  # the first values count as long as the process runs

    def set_tpu_launch_env(*, nproc_per_node: int) -> None:
        if nproc_per_node not in (1, 2, 4, 8):
            raise RuntimeError(f"No TPU topology found for count: {nproc_per_node}")
        ports = [f"localhost:{8471 + n}" for n in range(nproc_per_node)]
        resolved.setdefault("TORCH_TPU_SLICEBUILDER_ADDRESSES", ",".join(ports))
        resolved.setdefault("TORCH_TPU_TOPOLOGY", f"{nproc_per_node},1,1")
        for name, value in resolved.items():
            os.environ.setdefault(name, value)

    module.set_device = set_device
    module.get_rng_state = get_rng_state
    module.distributed = types.ModuleType("torch.tpu.distributed")
    module.distributed.set_tpu_launch_env = set_tpu_launch_env
    sys.modules["torch.tpu"] = module
    sys.modules["torch.tpu.distributed"] = module.distributed
