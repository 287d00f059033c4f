"""N data-parallel replicas on XLA:CPU, one thread each, with real collectives.

Upstream calls collectives on XLA:CPU unsupported, and a plain `torch_xla.launch` with
CPU_NUM_DEVICES=N dies at the first one. Five separate things must be put right
(measured with torch_xla 2.9.0; docs/architecture.md has the ablation):

1. A collective finds its partners by the id of the compiled program, so replicas must
   share one: a process-wide lock protects every place where a graph may compile. The
   first replica compiles, the others find the program in the cache.
2. A waiting collective blocks a thread of torch_xla's pool: the pool is made larger.
3. The lock's holder must not wait for its own earlier execution, which may wait for a
   peer that wants the lock: each replica waits for its device outside the lock.
4. Dropping a donated buffer waits for the execution that uses it with the GIL held:
   donation is switched off.
5. A sync on a device without any live tensor waits for device 0: each replica keeps
   one tensor alive.

In addition, replicas meet in Python before every graph with a collective
(`rendezvous`), so that a replica that differs, hangs or leaves is an error and not an
abort; gathers are unpinned; a fetch whose graph still holds a collective syncs first;
and each replica has what it would have as a process of its own (`own_process`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_replica.backends import counters
from xla_replica.common.trees import tensors_in
from xla_replica.device import explicit_precision
from xla_replica.device.seeding import own_draws
from xla_replica.emulated import compiling, own_process
from xla_replica.emulated.compiling import functions, replace
from xla_replica.emulated.rendezvous import Rendezvous, shown
from xla_replica.errors import ReplicaError

_COLLECTIVES = "all_reduce all_gather reduce_scatter all_to_all collective_permute"
_COMPILE_AND_START = "_xla_step_marker _xla_sync_live_tensors _xla_sync_multi"


def environment(num_replicas: int) -> dict[str, str]:
    """Returns what must be set before torch_xla is imported in the child."""
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(num_replicas),
        "XLA_THREAD_POOL_SIZE": str(max(2 * num_replicas, 8)),  # cure 2
        "XLA_ENABLE_PARAM_ALIASING": "0",  # cure 4
        "OMP_NUM_THREADS": "1",  # N replicas already fill the cores
    }


class Emulator:
    """Patches torch_xla in a process that has the variables of `environment`."""

    def __init__(self, num_replicas: int, timeout: float) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        self._rendezvous = Rendezvous(num_replicas, timeout)
        self._torch_xla, self._xr = torch_xla, xr
        self._c = native = torch_xla._XLAC
        self._compiling = threading.RLock()  # only one thread compiles at a time
        self._pending: list[list[str]] = [[] for _ in range(num_replicas)]
        self._alive: list[torch.Tensor] = []
        replace(xm, _COLLECTIVES, self._announce, is_traced=False)
        replace(native, _COMPILE_AND_START, self._start, is_traced=False)
        replace(native, "_xla_warm_up_cache _get_xla_tensors_hlo", self._compile)
        replace(native.lowering.LoweringContext, "build", self._compile)
        # It sets the process's precision while it lowers.
        replace(explicit_precision, "_lowered", self._compile)
        compiling.install(num_replicas, torch_xla.sync, self._compiling)
        own_process.install()

    @contextlib.contextmanager
    def replica(self) -> Iterator[None]:
        """Makes the calling thread, whose device is set, a replica."""
        rank = self._xr.global_ordinal()
        self._rendezvous.enter(rank)
        self._alive.append(torch.zeros(1).to(self._torch_xla.device()))  # cure 5
        device = str(self._torch_xla.device())
        of_threads = functools.partial(_CallGuard, self, None)
        own_process.begin_replica(device, of_threads)
        with _CallGuard(self, rank):
            yield
            self._torch_xla.sync()
        self._rendezvous.leave(rank)

    def _announce(self, trace: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Traces a collective of xla_model, and notes it as pending."""
        if trace.__name__ == "all_gather":
            kwargs["pin_layout"] = False  # pinned, graphs differ between replicas
            args = args[:4]
        collective = _call(trace.__name__, args, kwargs)
        self._pending[self._xr.global_ordinal()].append(collective)
        return trace(*args, **kwargs)

    def _start(self, start: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Compiles and starts a graph under the lock, after all replicas have met."""
        kwargs.pop("wait", None)  # the waits are here, outside the lock
        rank = self._xr.global_ordinal()
        if start.__name__ == "_xla_sync_multi":
            # Compiled functions call it for their inputs alone. Collectives that these
            # do not need would otherwise be taken for run.
            self._run_pending(rank)
        collectives, self._pending[rank] = self._pending[rank], []
        self._wait(rank)  # cure 3
        if collectives:
            self._rendezvous.meet(rank, collectives)
        with self._compiling:  # cure 1
            before = counters.snapshot().compilations if collectives else 0
            start(*args, **kwargs, wait=False)
            if collectives:
                compiled = counters.snapshot().compilations > before
                self._check_same_program(rank, compiled, shown(collectives[0]))
        self._wait(rank)  # cure 4: nothing is dropped while it runs
        if collectives:
            # Until then a peer that has yet to dispatch counts compilations, and this
            # replica's next one, a read in C++ say, would be taken for it.
            self._rendezvous.all_dispatched.wait(self._rendezvous.timeout)

    def _compile(self, compile_only: Callable[..., Any], *args: Any) -> Any:
        """Lowers or compiles what holds no collective, under the lock."""
        with self._compiling:
            return compile_only(*args)

    def _run_pending(self, rank: int) -> None:
        """Syncs if the replica has traced a collective that has not run yet."""
        if self._pending[rank]:
            # Not the raw step marker: only sync resets the chain of all-reduce tokens,
            # without which every call would be a new graph.
            self._torch_xla.sync()

    @contextlib.contextmanager
    def fetching(self, rank: int) -> Iterator[None]:
        """Surrounds a fetch, which may compile a graph without collectives.

        Beside a peer that compiles, the peer could take the fetch's compilation for its
        own. It syncs only what this replica has pending: the graph would otherwise
        depend on what peers have done.
        """
        self._run_pending(rank)
        self._wait(rank)  # cure 3
        with self._compiling:
            yield

    def _check_same_program(self, rank: int, compiled: bool, first: str) -> None:
        """Raises if this replica compiled a graph that its peers have dispatched."""
        here = self._rendezvous
        if compiled and here.num_dispatched:
            raise ReplicaError(
                f"replica {rank} compiled another program than its peers for the graph "
                f"with {first} (TPUs have run some of this kind): a Python number, a "
                "shape or a pending tensor differs. Bring such numbers to the device "
                "with Replica.scalar, and call Replica.sync() before the collective: "
                "docs/xla_replica.md#replicas-on-a-cpu",
                rank,
            )
        here.num_dispatched += 1
        if here.num_dispatched == here.num_replicas:
            here.all_dispatched.set()

    def _wait(self, rank: int) -> None:
        """Blocks until the replica's device is idle."""
        self._c._xla_wait_device_ops(devices=[f"CPU:{rank}"])


_TENSOR = torch.Tensor
# All of these read the device, whatever their arguments.
_FETCHING = """
    item cpu tolist numpy allclose argwhere bincount equal is_nonzero masked_select
    nonzero repeat_interleave unique unique_consecutive __array__ __bool__ __float__
    __int__ __index__ __contains__ __repr__ __format__ __deepcopy__ __reduce_ex__
"""
_FETCHES = functions(_FETCHING, torch.Tensor, torch)


class _CallGuard(TorchFunctionMode):
    """Syncs before any call that may read the device back, and draws as a process does.

    Such a call compiles and runs a separate graph, without the lock and the rendezvous.
    The guard costs little where no collective is pending. It does not see what the
    threads of autograd call: a hook that sums must not fetch.

    ``rank`` is None in a further thread of a replica. It reads what has been synced,
    and must not sync beside the replica.
    """

    def __init__(self, emulator: Emulator, rank: int | None) -> None:
        super().__init__()
        self._emulator, self._rank = emulator, rank

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # a graph fetches nothing
            return func(*args, **kwargs)
        if self._rank is not None and _fetches(func, args, kwargs):
            with self._emulator.fetching(self._rank):
                return func(*args, **kwargs)
        # On the device nothing is drawn from the CPU's generator, and a lazy operation
        # that falls back to the host might wait for peers.
        if func in own_process.DRAWS and not any(_on_xla(value) for value in args):
            with own_draws():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _fetches(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call reads the device."""
    if func in _FETCHES:
        return any(_on_xla(value) for value in args)
    if func is _TENSOR.to:
        target: Any = kwargs.get("device", args[1] if len(args) > 1 else None)
        target = getattr(target, "device", target)
        is_device = isinstance(target, (str, torch.device))
        return _on_xla(args[0]) and is_device and torch.device(target).type == "cpu"
    if func in (torch.where, _TENSOR.where):
        return len(args) + len(kwargs) == 1  # the positions of the true elements
    if func is _TENSOR.__getitem__:
        return _on_xla(args[0]) and bool(tensors_in(args[1]))
    if func is _TENSOR.__setitem__ and tensors_in(args[1]):
        return True
    return func in (_TENSOR.copy_, _TENSOR.__setitem__) and not _on_xla(args[0])


def _on_xla(value: Any) -> bool:
    """Returns whether a value is a tensor on an XLA device."""
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _call(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Returns name, reduction, dtypes and shapes: they are equal on all replicas."""
    described = [args[0]] if args and isinstance(args[0], str) else []
    for tensor in tensors_in([args, kwargs]):
        described.append(f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}")
    return f"{name}({', '.join(described)})"
