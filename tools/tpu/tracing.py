"""Has replicas write down their programs without compiling or running them.

So programs of models that would take this machine hours are written in minutes. What a
replica fetches is made of zeros. Programs are those of a TPU where a backend decides:
collectives of bfloat16 are not widened, as they are for XLA:CPU; and ``scatter_add`` is
dense, as torch_xla lowers it on a TPU unless indices are few (``ShouldUseDenseScatter``
in its ``xla_lower_util.cpp``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import xla_replica

_READS = "item cpu tolist numpy equal __bool__ __float__ __int__ __index__ to"
_FETCHES = {getattr(torch.Tensor, name) for name in _READS.split()}
# A scatter is dense unless it has fewer than one index for so many numbers.
DENSE_FROM = 100
_once = threading.Lock()


@contextlib.contextmanager
def tracing(write_text: Callable[[str], None]) -> Any:
    """Surrounds what the calling replica does; ``write_text`` takes every program."""
    replica: Any = xla_replica.current()
    replica.sync()
    with _once:
        _install(write_text)
    replica._on_cpu = False
    replica.all_gather_object = lambda value: [value] * replica.num_replicas
    with _AsOnTpu():
        yield


@functools.cache
def _install(write_text: Callable[[str], None]) -> None:
    """Replaces where torch_xla runs programs and reads results, in this process."""
    import torch_xla

    native = torch_xla._XLAC
    # While one thread asks for all objects no other one runs, not even one that waits
    # already: the tuple that it is making must not be held. They take turns at locks.
    sys.setswitchinterval(60)

    def write(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        device = xla_replica.current().device
        with _once, torch._C.DisableTorchFunction():
            pending = _pending(native, device)
            text = native._get_xla_tensors_hlo(pending) if pending else ""
            del pending
            native._clear_pending_irs(str(device))
        if text:
            write_text(_as_saved(text))

    for name in ("_xla_step_marker", "_xla_sync_multi", "_xla_sync_live_tensors"):
        setattr(native, name, write)
    native._xla_get_cpu_tensors = lambda tensors: [*map(_zeros, tensors)]


def _pending(native: Any, device: torch.device) -> list[torch.Tensor]:
    """Returns the replica's tensors that wait to be computed, the oldest first."""
    found, kinds = {}, (torch.Tensor, torch.nn.Parameter)
    for each in [each for each in gc.get_objects() if type(each) in kinds]:
        if _device(each) == device:
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None:
                    found[native._xla_get_tensor_id(tensor)] = tensor
    tensors = [found[number].detach() for number in sorted(found)]
    waiting = native._check_tensor_need_materialization(tensors) if tensors else []
    return [tensor for tensor, waits in zip(tensors, waiting) if waits]


def _device(tensor: torch.Tensor) -> torch.device | None:
    try:
        return tensor.device
    except RuntimeError:  # torch has some that have none
        return None


def _as_saved(text: str) -> str:
    """Returns a program as torch_xla saves it, with where it was cut."""
    frames = "\n".join(
        f"  {frame.name} ({frame.filename}:{frame.lineno})"
        for frame in reversed(traceback.extract_stack()[:-2])  # not those of here
    )
    return (
        f"TensorsGraphInfo:\n{frames}\n\n\n## BEGIN_GRAPH\n{text}"
        "\nGraph Hash: 0\n\n## END_GRAPH\n\n"
    )


class _AsOnTpu(TorchFunctionMode):
    """Has what reads a device read zeros, and scatters dense."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        to_device = func is torch.Tensor.to and not any(
            isinstance(each, (str, torch.device)) and torch.device(each).type == "cpu"
            for each in (*args[1:], *kwargs.values())
        )
        if func in _FETCHES and not to_device:
            args = [_zeros(each) for each in args]
        if func is torch.Tensor.scatter_add and not kwargs:
            func = scatter_add
        return func(*args, **kwargs)


def scatter_add(
    tensor: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Returns what torch's does, by comparisons where a TPU's program has these."""
    if DENSE_FROM * index.numel() < tensor.numel():
        return torch.scatter_add(tensor, dim, index, values)
    places = torch.arange(tensor.shape[dim], device=index.device, dtype=index.dtype)
    is_hit = index.unsqueeze(-1) == places
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    sums = torch.where(is_hit, values.unsqueeze(-1), zero).sum(dim)
    return tensor + sums.movedim(-1, dim)


def _zeros(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or xla_replica.traits(value).is_host:
        return value
    return torch.zeros(value.shape, dtype=value.dtype)
